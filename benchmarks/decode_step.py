"""How long a step of the engine takes in process: one prefill, then decode steps.

    python benchmarks/decode_step.py --batch 1 --context 240
    GOMP_SPINCOUNT=1000 python benchmarks/decode_step.py

The OpenMP settings of the environment are left as they are, so that they can be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

from relaykv.engine.assembly import build_core, prepare
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.request import GenerateRequest, SamplingParams

_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def step_times(core: EngineCore, batch: int, context: int, num_tokens: int) -> list[float]:
    """Seconds of every step that serves `batch` different prompts of `context` tokens."""
    sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = tuple(1000 + (7 * index + 13 * i) % 20000 for i in range(context))
        core.add(GenerateRequest(str(index), prompt, sampling))
    times = []
    while core.has_work:
        started = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - started)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=240, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=60, help="tokens each answer has")
    arguments = parser.parse_args()
    budget = arguments.batch * arguments.context  # so that the first step is the whole prefill
    parts = prepare(
        EngineOptions(
            model=arguments.model,
            dtype=arguments.dtype,
            max_num_batched_tokens=max(budget, 1),
            max_num_requests=arguments.batch,
        )
    )
    core = build_core(parts)
    prefill, *decodes = step_times(core, arguments.batch, arguments.context, arguments.tokens)
    decodes.sort()
    settings = " ".join(f"{name}={os.environ.get(name, '-')}" for name in _SETTINGS)
    print(
        f"{settings}: prefill {1e3 * prefill:.0f} ms, decode step median "
        f"{1e3 * statistics.median(decodes):.1f} ms, "
        f"90 % {1e3 * decodes[int(0.9 * len(decodes))]:.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
