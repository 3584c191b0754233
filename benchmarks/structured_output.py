"""What constrained decoding costs: time per output token with a JSON schema and without.

python benchmarks/structured_output.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from relaykv.engine.assembly import build_core, prepare
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.request import GenerateRequest, GrammarKind, GrammarSpec, SamplingParams

_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "stops": {
            "type": "array",
            "minItems": 8,
            "items": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "maxLength": 60},
                    "hours": {"type": "integer", "minimum": 1, "maximum": 12},
                    "kind": {"enum": ["museum", "walk", "meal", "rest"]},
                },
                "required": ["place", "hours", "kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "stops"],
    "additionalProperties": False,
}
_PROMPT = (
    "<|im_start|>user\nPlan a day in Lisbon with eight stops, as JSON.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def token_times(
    core: EngineCore, name: str, prompt: tuple[int, ...], batch: int, sampling: SamplingParams
) -> list[float]:
    """Seconds of every decode step of `batch` equal requests."""
    for index in range(batch):
        core.add(GenerateRequest(f"{name}-{index}", prompt, sampling))
    times = []
    while core.has_work:
        started = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - started)
    return times[2:]  # the prefill, and the step that compiles the grammar


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, taken in turn")
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()
    parts = prepare(EngineOptions(model=arguments.model, max_num_requests=max(arguments.batch)))
    core = build_core(parts)
    prompt = tuple(parts.tokenizer.encode(_PROMPT))
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    kinds = {
        "free": SamplingParams(arguments.tokens, temperature=0.0, ignore_eos=True),
        "schema": SamplingParams(arguments.tokens, temperature=0.0, grammar=grammar),
    }
    print("batch  ms/token free  ms/token schema  ratio (median of rounds, min-max)")
    for batch in arguments.batch:
        medians: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(arguments.rounds + 1):
            for kind, sampling in kinds.items():
                name = f"{batch}-{number}-{kind}"
                times = token_times(core, name, prompt, batch, sampling)
                if number:  # the first round warms up
                    medians[kind].append(1e3 * statistics.median(times))
        ratios = [b / a for a, b in zip(medians["free"], medians["schema"], strict=True)]
        print(
            f"{batch:>5}  {statistics.median(medians['free']):>13.1f}  "
            f"{statistics.median(medians['schema']):>15.1f}  {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
