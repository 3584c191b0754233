"""Whole decode steps as recorded graphs, one per padded number of rows.

A decode step launches hundreds of small kernels; replaying a graph launches them all at once. A
graph holds addresses, so its inputs live in buffers that stay: a step's rows are written there,
padded up to the next size that was captured, and the attention plan is filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.forward_batch import ForwardBatch
from relaykv.engine.forward_pass import ForwardPass
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.row_phases import attention_batch
from relaykv.kernels.attention import AttentionBatch, IntArray
from relaykv.kernels.staging import Staging

# Records what a function does on the device and returns what does it again. The output is the
# same memory every time.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphAttention(Protocol):
    """An attention backend whose decode plans can be captured."""

    def layout(self, batch: AttentionBatch) -> Any: ...

    def graph_plan(self, num_rows: int, max_blocks: int, scratch_block: int) -> Any:
        """A plan for `num_rows` decoding requests of at most `max_blocks` blocks each."""
        ...

    def fill(self, plan: Any, layout: Any, tensors: Sequence[Tensor]) -> None:
        """Makes such a plan serve a layout of at most as many rows; the others are padding."""
        ...


@dataclass(frozen=True, slots=True)
class _Graph:
    plan: Any
    replay: Callable[[], Tensor]  # logits, fp32 [size, vocab]


def graph_sizes(max_num_requests: int) -> tuple[int, ...]:
    """Numbers of rows worth a graph: small ones exactly, then multiples of 8."""
    sizes = {size for size in (1, 2, 4) if size <= max_num_requests}
    sizes.update(range(8, max_num_requests + 1, 8))
    return tuple(sorted({*sizes, max_num_requests}))


class DecodeGraphs:
    """Captured decode steps of one forward pass."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        attention: GraphAttention,
        cache: KVCache,
        staging: Staging,
        sizes: Sequence[int],
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """
        Args:
            sizes: numbers of rows to capture, rising.
            max_blocks: of one request.
        """
        self._forward_pass = forward_pass
        self._attention = attention
        self._scratch_block = cache.scratch_block
        self._scratch_slot = cache.scratch_block * cache.block_size
        self._staging = staging
        self._sizes = tuple(sizes)
        self._max_blocks = max_blocks
        self._capture = capture
        self._inputs = [
            torch.zeros(self._sizes[-1], dtype=torch.int64, device=cache.device) for _ in range(3)
        ]  # token ids, slots, positions
        self._graphs: dict[tuple[int, bool], _Graph] = {}

    def capture_all(self, progress: Callable[[Sequence[Any]], Sequence[Any]] = list) -> None:
        """Captures every size, with and without influence; largest first, so memory is shared.

        Args:
            progress: wraps the list of graphs to come, to show how far it is.
        """
        keys = [(size, counts) for size in reversed(self._sizes) for counts in (True, False)]
        for size, counts in progress(keys):
            self._add(size, counts)

    def covers(self, batch: ForwardBatch) -> bool:
        """Whether a batch is a decode step that fits a graph."""
        return (
            batch.is_decode_only
            and not batch.scored_rows
            and len(batch.sample_rows) == batch.num_requests
            and 0 < batch.num_requests <= self._sizes[-1]
        )

    def run(
        self,
        batch: ForwardBatch,
        sampled_before: tuple[Tensor, IntArray] | None,
        counts_influence: bool,
    ) -> Tensor:
        """As `ForwardPass.run`, for a batch that is covered; logits are good until the next run."""
        counts = counts_influence and any(batch.counts_influence)
        size = next(size for size in self._sizes if size >= batch.num_requests)
        graph = self._graphs[size, counts]
        layout = self._attention.layout(attention_batch(batch, np.arange(batch.num_requests)))
        before = np.zeros(0, dtype=np.int64) if sampled_before is None else sampled_before[1]
        padding = size - batch.num_requests
        inputs = [
            np.pad(values, (0, padding), constant_values=value)
            for values, value in (
                (batch.token_ids, 0),
                (batch.slots, self._scratch_slot),
                (batch.positions, 0),
            )
        ]
        arrays = [*inputs, batch.unknown_rows, before, *layout.arrays]
        brought = self._staging.upload(arrays)
        for buffer, values in zip(self._inputs, brought[:3], strict=True):
            buffer[:size].copy_(values)
        if sampled_before is not None:
            sampled = sampled_before[0].index_select(0, brought[4])
            self._inputs[0].index_copy_(0, brought[3], sampled)
        self._attention.fill(graph.plan, layout, brought[5:])
        return graph.replay()[: batch.num_requests]

    def _add(self, size: int, counts: bool) -> None:
        plan = self._attention.graph_plan(size, self._max_blocks, self._scratch_block)
        tokens, slots, positions = (buffer[:size] for buffer in self._inputs)
        slots.fill_(self._scratch_slot)
        replay = self._capture(
            lambda: self._forward_pass.run_decode(tokens, slots, positions, plan, counts)
        )
        self._graphs[size, counts] = _Graph(plan, replay)


def capture_on_cuda() -> Capture:
    """Capturing into CUDA graphs that share one memory pool, on the current stream's device."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # what is compiled or allocated at first use must not be recorded
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = function()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
