"""How far each policy's answers drift from a full prefill, over hand-offs of generated text.

Every producer of `handoffs.json` writes with greedy decoding on this engine, so the relayed KV is
what decoding produced. The consumer's answer is written on a full prefill; then each policy
builds its cache for the same prompt and the answer is forced through it. Reported is the
Kullback-Leibler divergence of the next-token distribution from the full prefill's, mean over the
answer's positions.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --hidden-layer 1 --bands 1,3,18 --bands 1,2,29
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from handoffs import Handoff, load_handoffs
from teacher_forcing import Forced, TeacherForcing

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands, Policy, builtin_policies
from relaykv.engine.recording import SessionKey
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams
from relaykv.server.chat_template import ChatTemplate, HuggingFaceTemplate

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """One hand-off under one policy."""

    handoff: str
    policy: str
    kl_mean: float
    kl_first: float
    top1_agreement: float
    recomputed_share: float
    num_prompt_tokens: int
    num_relayed_tokens: int
    num_segments: int
    num_generated_tokens: int  # by the producers


class Fidelity:
    """Writes the hand-offs' texts and scores policies on them."""

    def __init__(self, parts: EngineParts, template: ChatTemplate, max_tokens: int) -> None:
        self._core = build_core(parts)
        self._parts = parts
        self._template = template
        self._max_tokens = max_tokens
        self._forcing = TeacherForcing(parts, self._core)

    def write(self, handoffs: list[Handoff]) -> dict[str, list[str]]:
        """Lets every producer decode, all in one batch; the texts by hand-off."""
        requests = [
            GenerateRequest(
                request_id=f"{handoff.id}/{index}",
                prompt_token_ids=self._prompt(producer.system, producer.user),
                sampling=SamplingParams(self._max_tokens, temperature=0.0),
                relay=RelayOptions(session=handoff.id, policy="full"),
            )
            for handoff in handoffs
            for index, producer in enumerate(handoff.producers)
        ]
        texts = run(self._core, requests)
        return {h.id: [texts[f"{h.id}/{i}"][0] for i in range(len(h.producers))] for h in handoffs}

    def score(
        self,
        handoff: Handoff,
        outputs: list[str],
        policies: list[Policy],
        num_answer_tokens: int,
    ) -> list[Row]:
        """Compares policies with a full prefill on one hand-off."""
        prompt = self._prompt(handoff.consumer.system, handoff.consumer.user(outputs))
        sampling = SamplingParams(num_answer_tokens, temperature=0.0, ignore_eos=True)
        reader = GenerateRequest(f"{handoff.id}/reader", prompt, sampling)
        answer = run(self._core, [reader])[reader.request_id][1]
        key = SessionKey("", handoff.id)
        full = self._forcing.score(key, prompt, answer, Policy("full", relays=False))
        tokens = sum(len(self._parts.tokenizer.encode(text)) for text in outputs)
        rows = []
        for policy in policies:
            forced = self._forcing.score(key, prompt, answer, policy)
            rows.append(_compare(handoff.id, policy, full, forced, tokens))
        return rows

    def _prompt(self, system: str, user: str) -> tuple[int, ...]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return tuple(self._parts.tokenizer.encode(self._template.render(messages)))


def run(
    core: EngineCore, requests: list[GenerateRequest]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Serves requests together; the text and the token ids of each answer, by request id."""
    for request in requests:
        core.add(request)
    results: dict[str, tuple[str, tuple[int, ...]]] = {r.request_id: ("", ()) for r in requests}
    while core.has_work:
        for output in core.step():
            text, ids = results[output.request_id]
            results[output.request_id] = (text + output.text, ids + output.token_ids)
    return results


def _compare(handoff: str, policy: Policy, full: Forced, forced: Forced, tokens: int) -> Row:
    probabilities = full.log_probs.exp()
    kl = (probabilities * (full.log_probs - forced.log_probs)).sum(dim=-1).clamp_min(0.0)
    agreement = (full.log_probs.argmax(-1) == forced.log_probs.argmax(-1)).float().mean()
    return Row(
        handoff=handoff,
        policy=policy.name,
        kl_mean=float(kl.mean()),
        kl_first=float(kl[0]),
        top1_agreement=float(agreement),
        recomputed_share=forced.recomputed_share,
        num_prompt_tokens=forced.num_prompt_tokens,
        num_relayed_tokens=forced.num_relayed_tokens,
        num_segments=forced.num_segments,
        num_generated_tokens=tokens,
    )


def policies_to_score(parts: EngineParts, bands: list[Bands]) -> list[Policy]:
    """The built-in policies, and `relay` once more for every other choice of bands.

    Raises:
        ValueError: bands inject at a layer whose hidden states the cache does not keep.
    """
    kept = (0, parts.hidden_layer)
    policies = [p for p in parts.policies.values() if p.bands is None or p.bands.inject in kept]
    for choice in bands:
        if choice.inject not in kept:
            raise ValueError(
                f"bands {choice.inject},{choice.select},{choice.stop} inject at layer "
                f"{choice.inject}, hidden states are kept at layer {parts.hidden_layer}: "
                f"use --hidden-layer {choice.inject}"
            )
        relay = builtin_policies(parts.model.config.num_layers, choice)["relay"]
        name = f"relay {choice.inject},{choice.select},{choice.stop}"
        policies.append(replace(relay, name=name))
    return policies


def table(rows: list[Row]) -> str:
    """Markdown: one line per policy, means over hand-offs."""
    lines = [
        "| policy | recomputed | mean KL | median KL | first-token KL | top-1 agreement |",
        "|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == policy]
        lines.append(
            f"| {policy} | {_mean([r.recomputed_share for r in mine]):.1%} "
            f"| {_mean([r.kl_mean for r in mine]):.4f} "
            f"| {statistics.median(r.kl_mean for r in mine):.4f} "
            f"| {_mean([r.kl_first for r in mine]):.4f} "
            f"| {_mean([r.top1_agreement for r in mine]):.1%} |"
        )
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def _bands(text: str) -> Bands:
    try:
        inject, select, stop = (int(part) for part in text.split(","))
        return Bands(inject, select, stop)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: INJECT,SELECT,STOP expected") from error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-tokens", type=int, default=300, help="a producer writes at most")
    parser.add_argument("--answer-tokens", type=int, default=32, help="positions compared")
    parser.add_argument("--handoffs", type=Path, default=_FOLDER / "handoffs.json")
    parser.add_argument("--limit", type=int, help="only the first hand-offs")
    parser.add_argument(
        "--bands", type=_bands, action="append", default=[], metavar="INJECT,SELECT,STOP"
    )
    parser.add_argument(
        "--hidden-layer", type=int, help="keep hidden states there, for --bands that inject there"
    )
    parser.add_argument("--json", type=Path, help="write every row to this file")
    arguments = parser.parse_args()
    handoffs = load_handoffs(arguments.handoffs)[: arguments.limit]
    parts = prepare(EngineOptions(model=arguments.model, dtype=arguments.dtype))
    if arguments.hidden_layer is not None:
        parts = replace(parts, hidden_layer=arguments.hidden_layer)
    try:
        policies = policies_to_score(parts, arguments.bands)
    except ValueError as error:
        parser.error(str(error))
    fidelity = Fidelity(parts, HuggingFaceTemplate.from_folder(parts.folder), arguments.max_tokens)
    started = time.monotonic()
    texts = fidelity.write(handoffs)
    elapsed = time.monotonic() - started
    print(f"{len(handoffs)} hand-offs written in {elapsed:.0f} s", file=sys.stderr)
    rows: list[Row] = []
    for handoff in handoffs:
        rows += fidelity.score(handoff, texts[handoff.id], policies, arguments.answer_tokens)
        print(f"{handoff.id}: scored after {time.monotonic() - started:.0f} s", file=sys.stderr)
    one = [row for row in rows if row.policy == "shift"]
    print(
        f"{len(one)} hand-offs, {sum(r.num_segments for r in one)} segments, "
        f"{sum(r.num_generated_tokens for r in one)} generated tokens, of which "
        f"{sum(r.num_relayed_tokens for r in one)} relayed (with what stands around them)\n"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
