"""The roofline of both papers' models: phases, and the time to first token of every policy.

    python benchmarks/roofline.py

Markdown tables, pure arithmetic (`phase_costs.py`); `docs/gpu.md` holds their output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from model_shapes import ModelShape, llama_8b, qwen3_06b
from paper_setups import Piece, Setup, cold, kvcomm, relaycaching
from phase_costs import (
    Accelerator,
    Cost,
    accelerators,
    decode,
    floor_s,
    kv_bytes,
    num_parameters,
    prefill,
    shift_copy,
    total,
)

from relaykv.engine.policy import Policy, builtin_policies
from relaykv.engine.prefill_plan import SpanKind

_POLICIES = ("shift", "epic", "cacheblend", "relay")
_PREFILL_TOKENS = (1024, 8192)
_DECODE_BATCHES = (1, 32, 128)
_DECODE_CONTEXT = 2048


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/roofline.py",
        description="Floors of every phase, and of the time to first token, on paper.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--layer-us",
        type=float,
        default=100.0,
        help="host time per layer that the second ratio assumes: about ten launches",
    )
    options = parser.parse_args(argv)
    print("\n".join(tables(options.layer_us)))
    return 0


def tables(layer_us: float) -> list[str]:
    lines: list[str] = []
    for setup, shape in ((relaycaching(), qwen3_06b()), (kvcomm(), llama_8b())):
        lines += [*phase_table(setup, shape), "", *ttft_table(setup, shape, layer_us), ""]
    return lines[:-1]


def phase_table(setup: Setup, shape: ModelShape) -> Iterator[str]:
    """Operations, bytes and floors of every phase on one shape."""
    config = shape.config
    names = [accelerator.name for accelerator in accelerators()]
    yield (
        f"{shape.name}: {num_parameters(config) / 1e9:.2f} G parameters, "
        f"{kv_bytes(config) // 1024} KiB of KV per token"
    )
    yield ""
    yield _row("phase", "GFLOP", "GB", *(f"{name}, ms" for name in names))
    yield _rule(3 + len(names))
    for name, costs in _phases(setup, shape):
        whole = total(costs)
        floors = [f"{1e3 * floor_s(costs, a):.2f}" for a in accelerators()]
        yield _row(name, f"{whole.operations / 1e9:,.1f}", f"{whole.num_bytes / 1e9:.2f}", *floors)


def ttft_table(setup: Setup, shape: ModelShape, layer_us: float) -> Iterator[str]:
    """Floors of the time to first token, by agent and accelerator."""
    paper = setup.paper
    methods = tuple(paper.reuse_ms)
    yield (
        f"{paper.source} ({paper.machine}): prefix {setup.num_prefix}, question "
        f"{setup.num_question}, output {setup.num_output}, on the shape of {shape.name}. ms of "
        f"`full` without and with its prefix cached; the policies as `full` cached / policy, in "
        f"brackets with at least {layer_us:.0f} us a layer; the paper's as its full / method"
    )
    yield ""
    yield _row(
        "machine",
        "agent",
        "prompt",
        "`full` cold",
        "`full`",
        *(f"`{policy}`" for policy in _POLICIES),
        *(f"paper: {method}" for method in methods),
    )
    yield _rule(5 + len(_POLICIES) + len(methods))
    for accelerator in accelerators():
        for agent in setup.agents:
            cells = _ttft_cells(setup, shape, accelerator, agent, layer_us * 1e-6)
            ratios = [f"{paper.ratio(method, agent):.2f}" for method in methods]
            prompt = str(setup.num_prompt_tokens(agent))
            yield _row(accelerator.name, str(agent), prompt, *cells, *ratios)


def _ttft_cells(
    setup: Setup, shape: ModelShape, accelerator: Accelerator, agent: int, layer_s: float
) -> list[str]:
    config = shape.config
    policies = builtin_policies(config.num_layers, shape.bands)

    def floors(pieces: Sequence[Piece], policy: Policy) -> tuple[float, float]:
        costs = prefill(config, pieces, policy)
        return floor_s(costs, accelerator), floor_s(costs, accelerator, layer_s)

    plain = setup.pieces(agent, relays=False)
    cold_s = floors(cold(plain), policies["full"])
    full_s = floors(plain, policies["full"])
    cells = [f"{1e3 * cold_s[0]:.2f}", f"{1e3 * full_s[0]:.2f}"]
    for name in _POLICIES:
        policy_s = floors(setup.pieces(agent, relays=True), policies[name])
        ratio, with_host = (a / b for a, b in zip(full_s, policy_s, strict=True))
        cells.append(f"{ratio:.2f} ({with_host:.2f})")
    return cells


def _phases(setup: Setup, shape: ModelShape) -> Iterator[tuple[str, list[Cost]]]:
    config = shape.config
    policies = builtin_policies(config.num_layers, shape.bands)
    for count in _PREFILL_TOKENS:
        pieces = [Piece(SpanKind.COMPUTE, count)]
        yield f"prefill of {count}", prefill(config, pieces, policies["full"])
    last = setup.agents[-1]
    relayed = setup.pieces(last, relays=True)
    for name in ("cacheblend", "relay"):
        costs = prefill(config, relayed, policies[name])
        yield f"prompt of agent {last}, `{name}`", costs
    count = sum(piece.num_tokens for piece in relayed if piece.kind is SpanKind.RELAY)
    yield f"of which the shift copy of {count}", [shift_copy(config, count)]
    for batch in _DECODE_BATCHES:
        name = f"decode step, batch {batch}, context {_DECODE_CONTEXT}"
        yield name, decode(config, batch, _DECODE_CONTEXT)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(num_cells: int) -> str:
    return "|" + "---|" * num_cells


if __name__ == "__main__":
    sys.exit(main())
