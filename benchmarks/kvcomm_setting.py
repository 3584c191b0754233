"""KVCOMM's synthetic set-up: five agents in a line, each reads the question and all before it.

    python benchmarks/kvcomm_setting.py --question 128 --prefix 64 --output 64 --samples 6

Every sample has a question of its own; roles stay. An agent's prompt is read under every policy,
none of which keeps what it read, and last under `full`, which also writes the agent's text. So all
policies read the same text, and every writer's KV is exact. Role prompts are in the exact prefix
cache for all. Text is random tokens, outputs are sampled; the paper's question is of two symbols.

The paper's times come from its authors' script, which opens the gate (gamma 1, as --entropy 1 does)
and has no prefix cache under the dense prompt that it compares with.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from model_shapes import llama_8b
from paper_setups import Setup, kvcomm
from random_model import random_ids, request, tokens_of
from ttft import machine_line

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.core import EngineCore
from relaykv.engine.handoff_slots import NUM_LEVELS
from relaykv.engine.offset_memory import OffsetMemory
from relaykv.engine.options import EngineOptions
from relaykv.engine.recording import SessionKey
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import RelayOptions, RequestOutput

POLICIES = ("shift", "kvcomm", "learned")  # beside `full`
# KVCOMM, Table 1: calls that were relayed as a whole, with gamma 0.3 and up to 20 anchors.
_PAPER_CALLS = "MMLU 67.6 %, GSM8K 71.0 %, HumanEval 77.8 % of five agents' calls"
# Its Figure A.1 shows 16 GB for three agents; five, by the sizes that section 4 gives, are 33 GiB.
_PAPER_POOL_GIB = 33
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt read under one policy."""

    agent: int  # 1 is the first
    policy: str
    number: int  # of the question, from 0
    first_token_s: float
    num_segments: int
    num_relayed_segments: int
    num_matched_tokens: int  # that stand in segments
    num_relayed_tokens: int  # recomputed ones among them

    @property
    def is_relayed(self) -> bool:
        """Whether all that could be relayed was: the paper's unit."""
        return self.num_segments == self.num_relayed_segments > 0


class Chain:
    """One core, on which questions go through the line of agents."""

    def __init__(self, core: EngineCore, vocab_size: int, setup: Setup) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._setup = setup
        self._num_requests = 0
        for policy in ("full", *POLICIES):
            for agent in setup.agents:
                self._read(self._role(agent), policy, None, 1)

    def samples(self, number: int) -> Iterator[Sample]:
        """Lets one question through; yields every reading."""
        question = self._random(f"question {number}", self._setup.num_question)
        session = f"sample {number}"
        outputs: list[list[int]] = []
        for agent in self._setup.agents:
            prompt = self._prompt(agent, question, outputs)
            start = number % len(POLICIES)  # so that none always follows the same
            for policy in (*POLICIES[start:], *POLICIES[:start]):
                seconds, report, _ = self._read(prompt, policy, session, 1)
                yield _sample(agent, policy, number, seconds, report)
            seconds, report, output = self._read(prompt, "full", session, self._setup.num_output)
            yield _sample(agent, "full", number, seconds, report)
            outputs.append(output)
            self._share(session)
        for policy in ("full", *POLICIES):
            self._core.delete_session(policy, session)

    def _read(
        self, prompt: list[int], policy: str, session: str | None, num_tokens: int
    ) -> tuple[float, RelayReport, list[int]]:
        """Seconds to the first token, what was relayed, and the answer."""
        self._num_requests += 1
        name = f"{self._num_requests}"
        options = RelayOptions(session, policy, store=policy == "full", explain=True)
        spec = request(name, prompt, num_tokens, options, temperature=1.0, seed=self._num_requests)
        spec = replace(spec, tenant=policy)
        started = time.perf_counter()
        self._core.add(spec)
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs += self._core.step()
        seconds = time.perf_counter() - started
        while self._core.has_work:  # observations are launched here, behind the first token
            outputs += self._core.step()
        report = outputs[-1].relay
        assert report is not None
        return seconds, report, tokens_of(outputs)

    def _share(self, session: str) -> None:
        """Gives every policy the recordings, in the very same blocks."""
        recordings = self._core.recordings
        for key, found, _ in list(recordings.sessions("full")):
            if key.session != session:
                continue
            for policy in POLICIES:
                recordings.add(
                    found[-1].request_id,
                    SessionKey(policy, session),
                    found[-1].token_ids,
                    found[-1].blocks,
                    found[-1].num_prompt_tokens,
                    found[-1].taint,
                    found[-1].agent_class,
                )

    def _prompt(self, agent: int, question: list[int], outputs: Sequence[list[int]]) -> list[int]:
        glue = self._setup.num_glue
        prompt = [*self._role(agent), *self._random(f"glue {agent}", glue), *question]
        # Every reader's words in between are its own: else all texts were one segment.
        prompt += self._random(f"glue {agent} behind the question", glue)
        for writer, output in enumerate(outputs, start=1):
            prompt += [*output, *self._random(f"glue {agent} behind {writer}", glue)]
        return prompt

    def _role(self, agent: int) -> list[int]:
        return self._random(f"role {agent}", self._setup.num_prefix)

    def _random(self, seed: str, count: int) -> list[int]:
        return random_ids(seed, count, self._vocab_size)


def format_table(samples: Sequence[Sample], setup: Setup, num_cold: int) -> str:
    """Ratios of medians to `full` with its role prompt cached, by agent, and how much is relayed.

    Args:
        num_cold: samples that are left out: in them every segment is new to a policy that learns.
    """
    warm = [sample for sample in samples if sample.number >= num_cold]
    lines = [f"{'agent':>5}  {'policy':<8} {'ms':>8} {'full /':>7} {'paper':>6} {'tokens':>7}"]
    for agent in setup.agents:
        full = _median_s(warm, agent, "full")
        paper = f"{setup.paper.ratio('kvcomm', agent):.2f}"
        for policy in ("full", *POLICIES):
            seconds = _median_s(warm, agent, policy)
            mine = [s for s in warm if (s.agent, s.policy) == (agent, policy)]
            matched = sum(sample.num_matched_tokens for sample in mine)
            relayed = sum(sample.num_relayed_tokens for sample in mine)
            share = f"{relayed / matched:.0%}" if matched else "-"
            lines.append(
                f"{agent:>5}  {policy:<8} {seconds * 1000:>8.1f} {full / seconds:>7.2f} "
                f"{paper if policy == 'kvcomm' else '':>6} {share:>7}"
            )
    return "\n".join(lines)


def format_reuse(samples: Sequence[Sample], num_cold: int) -> str:
    """Shares of calls, segments and segments' tokens that were relayed, over all agents."""
    lines = []
    for policy in POLICIES:
        for name, first in (("all samples", 0), (f"from sample {num_cold + 1} on", num_cold)):
            mine = [s for s in samples if s.policy == policy and s.number >= first]
            mine = [sample for sample in mine if sample.num_segments]
            segments = sum(sample.num_segments for sample in mine)
            relayed = sum(sample.num_relayed_segments for sample in mine)
            tokens = sum(sample.num_matched_tokens for sample in mine)
            kept = sum(sample.num_relayed_tokens for sample in mine)
            calls = sum(sample.is_relayed for sample in mine)
            lines.append(
                f"{policy:<8} {name:<18} calls {calls / max(len(mine), 1):>5.1%}, "
                f"segments {relayed / max(segments, 1):>5.1%}, tokens {kept / max(tokens, 1):>5.1%}"
            )
    return "\n".join(lines)


def format_memory(core: EngineCore, parts: EngineParts, setup: Setup) -> str:
    """What kvcomm's pools hold beside what `learned` keeps of the same kinds of hand-offs."""
    stats = core.stats()
    num_kinds, num_paper_kinds = _num_kinds(setup), _num_kinds(kvcomm())
    learned = NUM_LEVELS * num_kinds * OffsetMemory.bytes_per_mean(parts.model.config)
    paper_learned = NUM_LEVELS * num_paper_kinds * OffsetMemory.bytes_per_mean(llama_8b().config)
    return (
        f"memory: kvcomm {stats.num_anchor_bytes / _GIB:.3f} GiB in {stats.num_anchors} anchors "
        f"({stats.num_refused_anchors} had no room); learned at most {learned / 1024:.0f} KiB for "
        f"the same {num_kinds} kinds of hand-offs.\nThe paper's pools on Llama-3.1-8B, five agents "
        f"and 20 anchors: {_PAPER_POOL_GIB} GiB; learned there: at most "
        f"{paper_learned / 1024:.0f} KiB for {num_paper_kinds} kinds."
    )


def _num_kinds(setup: Setup) -> int:
    """Every agent but the first reads the question, and each reads all texts before its own."""
    num_agents = len(setup.agents)
    return num_agents - 1 + num_agents * (num_agents - 1) // 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its tables."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    setup = replace(
        kvcomm(),
        num_prefix=options.prefix,
        num_question=options.question,
        num_output=options.output,
        agents=tuple(range(1, options.agents + 1)),
    )
    parts = prepare(
        EngineOptions(
            model=options.model,
            device=options.device,
            kv_memory_bytes=options.kv_memory_mib << 20 if options.kv_memory_mib else None,
            anchor_share=options.anchor_share,
            num_threads=options.threads,
        )
    )
    relay = replace(parts.relay, anchor_entropy=options.entropy, min_anchors=options.min_anchors)
    parts = replace(parts, relay=relay)
    print(f"machine: {machine_line()}")
    print(f"command: {shlex.join(['python', 'benchmarks/kvcomm_setting.py', *arguments])}")
    print(f"model:   {parts.card.name}\n", flush=True)
    run(build_core(parts), parts, setup, options.samples, options.cold)
    return 0


def run(
    core: EngineCore, parts: EngineParts, setup: Setup, num_samples: int, num_cold: int
) -> list[Sample]:
    """Lets the questions through and prints what came of it."""
    chain = Chain(core, parts.card.vocab_size, setup)
    samples = [sample for number in range(num_samples) for sample in chain.samples(number)]
    print(format_table(samples, setup, num_cold))
    print(f"\n{format_reuse(samples, num_cold)}\nthe paper (Table 1): {_PAPER_CALLS}\n")
    print(format_memory(core, parts, setup))
    return samples


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/kvcomm_setting.py",
        description="Reuse, time to first token and memory in KVCOMM's synthetic set-up.",
        epilog="full /: median of `full` (role prompt cached) over this median; paper: its dense"
        " prompt over KVCOMM; tokens: share of the segments' tokens that was relayed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--agents", type=int, choices=range(2, 6), default=5)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of every role prompt")
    parser.add_argument("--question", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=int, default=512, help="tokens of every agent's text")
    parser.add_argument("--samples", type=int, default=24, help="questions")
    parser.add_argument("--cold", type=int, default=6, help="samples before the table's first")
    parser.add_argument("--entropy", type=float, default=0.3, help="gamma; 1 opens the gate")
    parser.add_argument("--min-anchors", type=int, default=5, help="the authors' code: 2")
    parser.add_argument("--anchor-share", type=float, default=0.25, help="of the KV cache")
    parser.add_argument("--kv-memory-mib", type=int, help="by default the engine's choice")
    parser.add_argument("--threads", type=int, help="torch's; by default its choice")
    return parser


def _sample(
    agent: int, policy: str, number: int, first_token_s: float, report: RelayReport
) -> Sample:
    relayed = [segment for segment in report.segments if segment.policy != "full"]
    return Sample(
        agent,
        policy,
        number,
        first_token_s,
        len(report.segments),
        len(relayed),
        sum(segment.stop - segment.start for segment in report.segments),
        sum(segment.stop - segment.start for segment in relayed),
    )


def _median_s(samples: Sequence[Sample], agent: int, policy: str) -> float:
    times = [s.first_token_s for s in samples if (s.agent, s.policy) == (agent, policy)]
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
