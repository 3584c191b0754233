"""Attention over paged KV on a CUDA device, by FlashInfer's FA2 kernels.

A batch's rows are three contiguous ranges, and each is one launch: decodes; dense rows, under
FlashInfer's causal mask; and scattered rows, in sorted groups that fill a tile of 128 packed rows
each, whose blocks end with what the group's last row sees, under a mask of our own
(`scattered_causal`). n scattered rows must never be passed as one causal request: the mask would
take them for the last n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch, IntArray
from relaykv.kernels.attention_plan import (
    Int32Array,
    PagedIndices,
    RowGroups,
    contiguous_runs,
    paged_indices,
    row_groups,
)
from relaykv.kernels.flashinfer_wrappers import (
    AttentionShape,
    PartLayout,
    PartPlan,
    PlanEvent,
    PlannedWrapper,
    WrapperFactory,
)
from relaykv.kernels.kernel_set import AddInfluence

_TILE_ROWS = 128  # of the kernel, counting every query head of a key head as a row
# A step's row sets are planned one after another; with this many wrappers each, planning the
# first of a step does not wait for more than the step before last.
_WRAPPERS_PER_ROLE = 3
_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class FlashInferLayout:
    decode: PartLayout
    dense: PartLayout
    scattered: PartLayout
    row_positions: Int32Array  # [scattered rows], among the keys of their request
    counts_influence: Int32Array  # [decode rows], 0 or 1

    @property
    def arrays(self) -> tuple[Int32Array, ...]:
        return (
            self.decode.indices.kv_indices,
            self.dense.indices.kv_indices,
            self.scattered.indices.kv_indices,
            self.row_positions,
            self.decode.indices.kv_indptr,
            self.decode.num_keys,
            self.counts_influence,
        )


@dataclass(frozen=True, slots=True)
class _InfluenceIndices:
    """What `add_influence` reads of decoding rows; int32, on the device."""

    block_ids: Tensor
    block_indptr: Tensor  # [rows + 1]
    num_keys: Tensor  # [rows]
    counts: Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Planned in FlashInfer only when it is first run, so plans made ahead occupy no wrapper."""

    decode: PartPlan
    dense: PartPlan
    scattered: PartPlan
    row_positions: Tensor  # int32 [scattered rows]
    influence: _InfluenceIndices | None  # None: no decoding row counts it


@dataclass(frozen=True, slots=True)
class FlashInferGraphPlan:
    """A decode plan in buffers that stay, for a CUDA graph; `fill` makes it serve a layout."""

    num_rows: int
    scratch_block: int
    wrapper: PlannedWrapper
    influence: _InfluenceIndices


class FlashInferAttention:
    """FlashInfer's paged wrappers behind `AttentionBackend`, for bf16 and fp16.

    Everything is enqueued on the current stream, which must be the same one for all calls.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        add_influence: AddInfluence,
        deterministic: bool = False,
        stock_module: bool = False,
        tensor_core_decode: bool | None = None,
        workspace_bytes: int = _WORKSPACE_BYTES,
        new_event: Callable[[], PlanEvent] | None = None,
    ) -> None:
        """
        Args:
            add_influence: see `influence.add_influence`.
            deterministic: never splits a row's keys over blocks of the device, so how sums are
                split no longer depends on what else is in the batch. Costs speed where few rows
                see many keys. The query tile of dense rows still follows from the batch.
            stock_module: scattered rows go as one causal request per run without a gap, through
                the same module as dense ones: nothing of our own is compiled, keys are read more
                often.
            tensor_core_decode: None decides by the number of query heads per key head. Asking
                for no tensor cores is ignored where only they can do it.
            workspace_bytes: for partial results of split keys, on the device.
            new_event: None takes `torch.cuda.Event` on CUDA and nothing on a CPU, where copies
                are done at once.

        Raises:
            ModuleNotFoundError: FlashInfer is not installed.
            ValueError: a dtype other than bf16 and fp16.
        """
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"FlashInfer needs bfloat16 or float16, not {dtype}")
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, dtype, device)
        if new_event is None and device.type == "cuda":
            new_event = torch.cuda.Event
        self._shape = shape
        self._stock_module = stock_module
        self._add_influence = add_influence
        self._factory = WrapperFactory(
            shape,
            deterministic=deterministic,
            workspace_bytes=workspace_bytes,
            tensor_core_decode=tensor_core_decode,
            new_event=new_event,
        )
        self._decode = self._factory.decode_ring(_WRAPPERS_PER_ROLE)
        self._dense = self._factory.dense_ring(_WRAPPERS_PER_ROLE)
        make_scattered = self._factory.dense_ring if stock_module else self._factory.scattered_ring
        self._scattered = make_scattered(_WRAPPERS_PER_ROLE)
        self._graph_plans: dict[tuple[int, int, int], FlashInferGraphPlan] = {}
        self._graph_block_ids = torch.empty(0, dtype=torch.int32, device=device)

    def layout(self, batch: AttentionBatch) -> FlashInferLayout:
        decodes = batch.num_decodes
        dense = decodes + batch.num_dense
        positions = batch.row_positions
        decode_groups = row_groups(batch.row_indptr[: decodes + 1], positions, 1)
        dense_groups = row_groups(batch.row_indptr[decodes : dense + 1], positions, None)
        scattered_indptr = batch.row_indptr[dense:]
        if self._stock_module:
            scattered_groups = contiguous_runs(scattered_indptr, positions)
        else:
            group_rows = max(_TILE_ROWS // self._shape.gqa, 1)
            scattered_groups = row_groups(scattered_indptr, positions, group_rows)
        counts = np.array(batch.counts_influence, dtype=np.int32)
        return FlashInferLayout(
            self._part(batch, decode_groups, 0),
            self._part(batch, dense_groups, decodes),
            self._part(batch, scattered_groups, dense),
            positions[batch.row_indptr[dense] :].astype(np.int32),
            counts[decode_groups.requests],
        )

    def prepare(self, layout: FlashInferLayout, tensors: Sequence[Tensor]) -> FlashInferPlan:
        decode, dense, scattered, row_positions, indptr, num_keys, counts = tensors
        influence = None
        if layout.counts_influence.any():
            influence = _InfluenceIndices(decode, indptr, num_keys, counts)
        return FlashInferPlan(
            PartPlan(layout.decode, decode),
            PartPlan(layout.dense, dense),
            PartPlan(layout.scattered, scattered),
            row_positions,
            influence,
        )

    def graph_plan(self, num_rows: int, max_blocks: int, scratch_block: int) -> FlashInferGraphPlan:
        """A plan that a CUDA graph can hold, filled with padding; the same one for the same sizes.

        Plans share memory: one is good for the replays between its `fill` and the next one's.

        Args:
            num_rows: decoding requests, of one row each.
            max_blocks: of one request.
            scratch_block: what rows that only pad attend to the first key of.
        """
        key = (num_rows, max_blocks, scratch_block)
        if key not in self._graph_plans:
            self._graph_plans[key] = self._new_graph_plan(num_rows, max_blocks, scratch_block)
        return self._graph_plans[key]

    def fill(
        self, plan: FlashInferGraphPlan, layout: FlashInferLayout, tensors: Sequence[Tensor]
    ) -> None:
        """Makes a graph's plan serve a layout of decodes alone; further rows are padding.

        Args:
            tensors: as for `prepare`.

        Raises:
            ValueError: the layout has other rows than decodes, or more than the plan.
        """
        num_rows = layout.decode.stop
        if len(layout.dense.num_keys) or len(layout.scattered.num_keys):
            raise ValueError("only decodes can be replayed")
        if num_rows > plan.num_rows:
            raise ValueError(f"{num_rows} rows in a graph of {plan.num_rows}")
        block_ids, _, _, _, _, num_keys, counts = tensors
        padded = _padded(layout.decode, plan.num_rows - num_rows, plan.scratch_block)
        plan.wrapper.plan(PartPlan(padded, block_ids))
        num_blocks = len(layout.decode.indices.kv_indices)
        padding = plan.num_rows - num_rows
        plan.influence.block_ids[num_blocks : num_blocks + padding].fill_(plan.scratch_block)
        plan.influence.num_keys[:num_rows].copy_(num_keys)
        plan.influence.num_keys[num_rows:].fill_(1)
        plan.influence.counts[:num_rows].copy_(counts)
        plan.influence.counts[num_rows:].zero_()

    def run(
        self,
        plan: FlashInferPlan | FlashInferGraphPlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        received: Tensor | None,
    ) -> Tensor:
        """See `AttentionBackend.run`. On a graph's plan it plans nothing and can be captured."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pages = (self._pages(k_cache), self._pages(v_cache))
        if isinstance(plan, FlashInferGraphPlan):
            wrapper = plan.wrapper.wrapper
            self._run_decode(wrapper, plan.influence, q, k_cache, pages, out, received)
            return out
        if len(plan.decode.layout.num_keys):
            rows = slice(plan.decode.layout.start, plan.decode.layout.stop)
            wrapper = self._decode.planned(plan.decode)
            self._run_decode(wrapper, plan.influence, q[rows], k_cache, pages, out[rows], received)
        if len(plan.dense.layout.num_keys):
            rows = slice(plan.dense.layout.start, plan.dense.layout.stop)
            self._dense.planned(plan.dense).run(q[rows], pages, out=out[rows])
        if len(plan.scattered.layout.num_keys):
            rows = slice(plan.scattered.layout.start, plan.scattered.layout.stop)
            extra = () if self._stock_module else (plan.row_positions,)
            self._scattered.planned(plan.scattered).run(q[rows], pages, *extra, out=out[rows])
        return out

    def _run_decode(
        self,
        wrapper: Any,
        influence: _InfluenceIndices | None,
        q: Tensor,
        k_cache: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        received: Tensor | None,
    ) -> None:
        if received is None or influence is None:
            wrapper.run(q, pages, out=out)
            return
        _, lse = wrapper.run(q, pages, out=out, return_lse=True)
        self._add_influence(
            received,
            q,
            k_cache,
            lse,
            influence.block_ids,
            influence.block_indptr,
            influence.num_keys,
            influence.counts,
            self._shape.block_size,
            self._shape.scale,
        )

    def _part(self, batch: AttentionBatch, groups: RowGroups, first_request: int) -> PartLayout:
        indices = paged_indices(
            groups, batch.block_indptr[first_request:], batch.block_ids, self._shape.block_size
        )
        start, stop = int(groups.indptr[0]), int(groups.indptr[-1])
        return PartLayout(start, stop, indices, groups.num_keys.astype(np.int32))

    def _new_graph_plan(
        self, num_rows: int, max_blocks: int, scratch_block: int
    ) -> FlashInferGraphPlan:
        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._shape.device)

        # The largest buffer by far serves all graphs; those captured before it grew keep theirs.
        if len(self._graph_block_ids) < num_rows * max_blocks:
            self._graph_block_ids = buffer(num_rows * max_blocks)
        influence = _InfluenceIndices(
            self._graph_block_ids, buffer(num_rows + 1), buffer(num_rows), buffer(num_rows)
        )
        wrapper = self._factory.graph_decode(
            influence.block_indptr, influence.block_ids, buffer(num_rows)
        )
        plan = FlashInferGraphPlan(num_rows, scratch_block, wrapper, influence)
        nothing = self.layout(_NO_ROWS)
        self.fill(plan, nothing, [buffer(len(array)) for array in nothing.arrays])
        return plan

    def _pages(self, cache: Tensor) -> Tensor:
        """[slots, kv heads, head dim] -> [blocks, block size, kv heads, head dim], a view."""
        return cache.view(-1, self._shape.block_size, *cache.shape[1:])


def _padded(part: PartLayout, num_rows: int, block: int) -> PartLayout:
    """A part of single rows with `num_rows` more, which see the first key of a block each."""
    indices = part.indices
    ones = np.ones(num_rows, dtype=np.int32)
    return PartLayout(
        part.start,
        part.stop + num_rows,
        PagedIndices(
            np.arange(part.stop + num_rows + 1, dtype=np.int32),
            np.append(indices.kv_indptr, indices.kv_indptr[-1] + np.cumsum(ones, dtype=np.int32)),
            np.append(indices.kv_indices, block * ones),
            np.append(indices.last_page_len, ones),
        ),
        np.append(part.num_keys, ones),
    )


def _zeros(size: int) -> IntArray:
    return np.zeros(size, dtype=np.int64)


_NO_ROWS = AttentionBatch(_zeros(1), _zeros(0), _zeros(1), _zeros(0), (), 0, 0)
