"""Decode steps as graphs, with a capture that runs the function again instead of recording it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny_core import Result, ids, request, run, tiny_parts
from torch import Tensor

from relaykv.engine.assembly import build_core
from relaykv.engine.config import DeviceConfig
from relaykv.engine.core import EngineCore
from relaykv.kernels.attention_torch import (
    TorchAttention,
    TorchAttentionLayout,
    TorchAttentionPlan,
)


@dataclass
class RefillablePlan:
    """What a graph holds on to, while its contents change from step to step."""

    num_rows: int
    scratch_block: int
    contents: TorchAttentionPlan | None = None


class GraphTorchAttention(TorchAttention):
    """The torch backend with plans that can be captured."""

    def graph_plan(self, num_rows: int, max_blocks: int, scratch_block: int) -> RefillablePlan:
        assert max_blocks == 25  # 400 tokens
        return RefillablePlan(num_rows, scratch_block)

    def fill(
        self, plan: RefillablePlan, layout: TorchAttentionLayout, tensors: Sequence[Tensor]
    ) -> None:
        assert len(layout.row_positions) <= plan.num_rows
        plan.contents = super().prepare(layout, tensors)

    def run(
        self,
        plan: TorchAttentionPlan | RefillablePlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        received: Tensor | None,
    ) -> Tensor:
        if isinstance(plan, TorchAttentionPlan):
            return super().run(plan, q, k_cache, v_cache, received)
        if plan.contents is None:
            return torch.zeros_like(q)  # being captured
        out = super().run(plan.contents, q, k_cache, v_cache, received)
        num_filled = sum(
            group.stop - group.start for r in plan.contents.requests for group in r.groups
        )
        out[num_filled:] = float("nan")  # nothing may be made of padding
        return out


class Recorder:
    """Counts how often each captured function was replayed."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        function()
        index = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> Tensor:
            self.num_replays[index] += 1
            return function()

        return replay


def _core(recorder: Recorder | None, **device: Any) -> EngineCore:
    parts = tiny_parts()
    config = parts.model.config
    sizes = (1, 2, 4) if recorder else ()
    parts = replace(parts, device=DeviceConfig(graph_sizes=sizes, **device))
    attention = GraphTorchAttention(
        config.num_heads, config.num_kv_heads, config.head_dim, 16, parts.model.dtype
    )
    return build_core(parts, attention, recorder)


def _crew(core: EngineCore) -> list[Result]:
    """A writer, then two readers of its text at once beside a third request."""
    (writer,) = run(core, request("w", ids(1, 70), 50, session="s"))
    readers = [
        request(
            f"r{i}", [*ids(i, 40), *writer.token_ids, *ids(7, 9)], 12, session="s", policy="relay"
        )
        for i in (2, 3)
    ]
    return [writer, *run(core, *readers, request("x", ids(4, 30), 25, temperature=0.8, seed=3))]


def test_answers_are_the_same_with_and_without_graphs() -> None:
    recorder = Recorder()

    with_graphs, without = _crew(_core(recorder)), _crew(_core(None))

    assert [r.token_ids for r in with_graphs] == [r.token_ids for r in without]
    assert [r.relay for r in with_graphs] == [r.relay for r in without]
    assert sum(recorder.num_replays) > 60


def test_influence_is_the_same_with_and_without_graphs() -> None:
    cores = [_core(Recorder()), _core(None)]
    for core in cores:
        _crew(core)

    with_graphs, without = (core.runner.cache.influence[:-16] for core in cores)
    assert float(without.sum()) > 100
    torch.testing.assert_close(with_graphs, without)


def test_every_size_is_captured_once_with_and_without_influence() -> None:
    recorder = Recorder()

    _core(recorder)

    assert recorder.num_replays == [0] * 6


def test_a_batch_is_padded_to_the_next_size() -> None:
    recorder = Recorder()
    core = _core(recorder)

    run(core, *(request(f"r{i}", ids(i, 5), 9) for i in range(3)))

    # Largest first, each with influence, then without.
    assert recorder.num_replays == [0, 8, 0, 0, 0, 0]


def test_more_rows_than_the_largest_graph_run_without_one() -> None:
    recorder = Recorder()
    core = _core(recorder)

    results = run(core, *(request(f"r{i}", ids(i, 5), 6) for i in range(6)))

    assert sum(recorder.num_replays) == 0
    assert all(len(result.token_ids) == 6 for result in results)


def test_influence_is_collected_on_every_nth_step_only() -> None:
    recorder = Recorder()

    run(_core(recorder, influence_step_stride=2), request("w", ids(1, 20), 21, session="s"))

    with_influence, without = recorder.num_replays[4:]
    assert with_influence == without == 10


@pytest.mark.parametrize("stride", [1, 2])
def test_influence_is_collected_on_every_nth_layer_only(stride: int) -> None:
    core = _core(None, influence_layer_stride=stride)

    run(core, request("w", ids(1, 20), 11, session="s"))

    # Each of 10 decoding rows gives a probability of 1 per head on each layer that counts; the
    # part that it gives to itself and to later rows stays with them.
    config = tiny_parts().model.config
    num_layers = len(range(0, config.num_layers, stride))
    total = float(core.runner.cache.influence.sum())
    assert total == pytest.approx(10 * config.num_heads * num_layers, rel=1e-4)
