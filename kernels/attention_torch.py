"""Attention over paged KV in plain torch: the backend on a CPU, and the oracle of all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch, Influence

# Sorted rows that share one trimmed list of keys. Small groups waste fewer masked keys, large
# ones call less often.
_GROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows [start, stop) of the batch, which see at most the first `num_keys` keys."""

    start: int
    stop: int
    num_keys: int
    mask: Tensor | None  # [gqa * rows, num_keys], 0 or -inf; None for a single row


@dataclass(frozen=True, slots=True)
class _RequestPlan:
    slots: Tensor  # int64 [kv], in sequence order
    groups: tuple[_Group, ...]
    received: Tensor | None  # fp32 [kv], added to by every run


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

    def prepare(self, batch: AttentionBatch) -> TorchAttentionPlan:
        requests = []
        for index in range(batch.num_requests):
            start, stop = batch.row_indptr[index : index + 2]
            if start == stop:
                continue
            blocks = batch.block_ids[batch.block_indptr[index] : batch.block_indptr[index + 1]]
            offsets = torch.arange(self._block_size, device=blocks.device)
            num_keys = int(batch.row_positions[stop - 1]) + 1
            slots = (blocks[:, None] * self._block_size + offsets).flatten()[:num_keys]
            counts = batch.counts_influence[index] and stop - start == 1
            received = torch.zeros(num_keys, device=slots.device) if counts else None
            groups = self._groups(batch.row_positions, start, stop)
            requests.append(_RequestPlan(slots, groups, received))
        return TorchAttentionPlan(tuple(requests))

    def run(self, plan: TorchAttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for request in plan.requests:
            # [kv, kv heads, head dim] -> [kv heads, kv, head dim], a view
            keys = k_cache.index_select(0, request.slots).transpose(0, 1)
            values = v_cache.index_select(0, request.slots).transpose(0, 1)
            for group in request.groups:
                rows = q[group.start : group.stop]
                if group.mask is None:
                    out[group.start] = self._attend_one(rows[0], keys, values, request.received)
                else:
                    out[group.start : group.stop] = self._attend_group(rows, keys, values, group)
        return out

    def influence(self, plan: TorchAttentionPlan) -> list[Influence]:
        return [
            Influence(request.slots, request.received)
            for request in plan.requests
            if request.received is not None
        ]

    def _groups(self, positions: Tensor, start: int, stop: int) -> tuple[_Group, ...]:
        if stop - start == 1:
            return (_Group(start, stop, int(positions[start]) + 1, None),)
        groups = []
        for first in range(start, stop, _GROUP_ROWS):
            last = min(first + _GROUP_ROWS, stop)
            num_keys = int(positions[last - 1]) + 1
            keys = torch.arange(num_keys, device=positions.device)
            hidden = keys > positions[first:last, None]  # [rows, keys]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
            mask.masked_fill_(hidden, -math.inf)
            groups.append(_Group(first, last, num_keys, mask.repeat(self._gqa, 1)))
        return tuple(groups)

    def _attend_group(self, rows: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
        """rows [n, heads, head dim] -> the same, against the first keys of the request."""
        num_rows = rows.shape[0]
        packed = rows.view(num_rows, self._num_kv_heads, self._gqa, self._head_dim)
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

    def _attend_one(
        self, row: Tensor, keys: Tensor, values: Tensor, received: Tensor | None
    ) -> Tensor:
        """row [heads, head dim] -> the same; adds each key's probability to `received`."""
        packed = row.view(self._num_kv_heads, self._gqa, self._head_dim)
        scores = torch.bmm(packed, keys.transpose(1, 2)).float() * self._scale
        probabilities = scores.softmax(dim=-1)  # [kv heads, gqa, kv]
        if received is not None:
            received += probabilities.sum(dim=(0, 1))
        return torch.bmm(probabilities.to(values.dtype), values).view(row.shape)
