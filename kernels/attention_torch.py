"""Attention over paged KV in plain torch: the backend on a CPU, and the oracle of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch, IntArray
from relaykv.kernels.attention_plan import row_groups

# Sorted rows that share one trimmed list of keys. Small groups waste fewer masked keys, large
# ones call less often.
_GROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class _GroupSpan:
    """Rows [start, stop) of the batch, which see at most the first `num_keys` keys."""

    start: int
    stop: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class _RequestSpan:
    """A request's part [slot_start, slot_stop) of the layout's slots, and its rows' groups."""

    slot_start: int
    slot_stop: int
    counts_influence: bool
    groups: tuple[_GroupSpan, ...]


@dataclass(frozen=True, slots=True)
class TorchAttentionLayout:
    slots: IntArray  # of every request's keys that its rows see, in sequence order
    row_positions: IntArray  # [rows]
    requests: tuple[_RequestSpan, ...]

    @property
    def arrays(self) -> tuple[IntArray, IntArray]:
        return self.slots, self.row_positions


@dataclass(frozen=True, slots=True)
class _Group:
    start: int
    stop: int
    num_keys: int
    mask: Tensor | None  # [gqa * rows, num_keys], 0 or -inf; None for a request's only row


@dataclass(frozen=True, slots=True)
class _RequestPlan:
    slots: Tensor  # int64 [kv], in sequence order
    groups: tuple[_Group, ...]
    counts_influence: bool


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    requests: tuple[_RequestPlan, ...]


class TorchAttention:
    """Gathers each request's keys once per layer and attends groups of its rows to them.

    Query heads that share a key head are packed into rows, which turns grouped-query attention
    into ordinary attention with more rows and reads every key once.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._gqa = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._dtype = dtype
        self._scale = 1.0 / math.sqrt(head_dim)

    def layout(self, batch: AttentionBatch) -> TorchAttentionLayout:
        groups = row_groups(batch.row_indptr, batch.row_positions, _GROUP_ROWS)
        by_request: dict[int, list[_GroupSpan]] = {}
        for index, request in enumerate(groups.requests.tolist()):
            start, stop = (int(row) for row in groups.indptr[index : index + 2])
            span = _GroupSpan(start, stop, int(groups.num_keys[index]))
            by_request.setdefault(request, []).append(span)
        slots, requests, num_slots = [], [], 0
        offsets = np.arange(self._block_size)
        for request, spans in by_request.items():
            num_keys = spans[-1].num_keys
            blocks = batch.block_ids[batch.block_indptr[request] : batch.block_indptr[request + 1]]
            slots.append((blocks[:, None] * self._block_size + offsets).reshape(-1)[:num_keys])
            counts = batch.counts_influence[request] and request < batch.num_decodes
            requests.append(_RequestSpan(num_slots, num_slots + num_keys, counts, tuple(spans)))
            num_slots += num_keys
        all_slots = np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64)
        return TorchAttentionLayout(all_slots, batch.row_positions, tuple(requests))

    def prepare(
        self, layout: TorchAttentionLayout, tensors: Sequence[Tensor]
    ) -> TorchAttentionPlan:
        slots, positions = tensors
        return TorchAttentionPlan(
            tuple(
                _RequestPlan(
                    slots[request.slot_start : request.slot_stop],
                    self._groups(request.groups, positions),
                    request.counts_influence,
                )
                for request in layout.requests
            )
        )

    def run(
        self,
        plan: TorchAttentionPlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        received: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        for request in plan.requests:
            # [kv, kv heads, head dim] -> [kv heads, kv, head dim], a view
            keys = k_cache.index_select(0, request.slots).transpose(0, 1)
            values = v_cache.index_select(0, request.slots).transpose(0, 1)
            for group in request.groups:
                rows = q[group.start : group.stop]
                if group.mask is None:
                    out[group.start], probabilities = self._attend_one(rows[0], keys, values)
                    if received is not None and request.counts_influence:
                        received.index_add_(0, request.slots, probabilities.sum(dim=(0, 1)))
                else:
                    out[group.start : group.stop] = self._attend_group(rows, keys, values, group)
        return out

    def _groups(self, spans: Sequence[_GroupSpan], positions: Tensor) -> tuple[_Group, ...]:
        if spans[-1].stop - spans[0].start == 1:
            return (_Group(spans[0].start, spans[0].stop, spans[0].num_keys, None),)
        groups = []
        for span in spans:
            keys = torch.arange(span.num_keys, device=positions.device)
            hidden = keys > positions[span.start : span.stop, None]  # [rows, keys]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
            mask.masked_fill_(hidden, -math.inf)
            groups.append(_Group(span.start, span.stop, span.num_keys, mask.repeat(self._gqa, 1)))
        return tuple(groups)

    def _attend_group(self, rows: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
        """rows [n, heads, head dim] -> the same, against the first keys of the request."""
        num_rows = rows.shape[0]
        packed = rows.reshape(num_rows, self._num_kv_heads, self._gqa, self._head_dim)
        packed = packed.permute(1, 2, 0, 3).reshape(1, self._num_kv_heads, -1, self._head_dim)
        attended = F.scaled_dot_product_attention(
            packed,
            keys[None, :, : group.num_keys],
            values[None, :, : group.num_keys],
            attn_mask=group.mask,
            scale=self._scale,
        )
        unpacked = attended.view(self._num_kv_heads, self._gqa, num_rows, self._head_dim)
        return unpacked.permute(2, 0, 1, 3).reshape(rows.shape)

    def _attend_one(self, row: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """row [heads, head dim] -> the same, and the probabilities fp32 [kv heads, gqa, kv]."""
        packed = row.reshape(self._num_kv_heads, self._gqa, self._head_dim)
        scores = torch.bmm(packed, keys.transpose(1, 2)).float() * self._scale
        probabilities = scores.softmax(dim=-1)
        return torch.bmm(probabilities.to(values.dtype), values).view(row.shape), probabilities
