"""Batches for tests of attention backends, and what attention is, in fp64 and without pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaykv.kernels.attention import AttentionBackend, AttentionBatch

BLOCK = 16
NUM_BLOCKS = 40


def random_cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, [slots, kv heads, head dim]."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS * BLOCK, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return k.to(dtype), v.to(dtype)


def random_tables(num_requests: int, num_blocks: int = 13) -> list[list[int]]:
    """Block tables, some of whose blocks stand in several of them."""
    return [[(7 * i + 13 * r) % NUM_BLOCKS for i in range(num_blocks)] for r in range(num_requests)]


def attention_batch(
    rows: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    num_decodes: int = 0,
    num_dense: int = 0,
    counts: Sequence[bool] | None = None,
) -> AttentionBatch:
    """A batch from the positions and the block table of each request."""
    return AttentionBatch(
        row_indptr=np.cumsum([0, *map(len, rows)]),
        row_positions=np.array([p for positions in rows for p in positions], dtype=np.int64),
        block_indptr=np.cumsum([0, *map(len, tables)]),
        block_ids=np.array([b for blocks in tables for b in blocks], dtype=np.int64),
        counts_influence=tuple(counts or [False] * len(rows)),
        num_decodes=num_decodes,
        num_dense=num_dense,
    )


def prepared(attention: AttentionBackend[Any, Any], batch: AttentionBatch) -> Any:
    layout = attention.layout(batch)
    return attention.prepare(layout, [torch.from_numpy(array) for array in layout.arrays])


def dense_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Sequence[int], blocks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """One request's rows: the result, and the probabilities [heads, rows, keys of the last row]."""
    gqa = q.shape[1] // k_cache.shape[1]
    slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(max(positions) + 1)]
    keys, values = (
        cache[slots].double().repeat_interleave(gqa, dim=1).transpose(0, 1)
        for cache in (k_cache, v_cache)
    )  # [heads, keys, head dim]
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(q.shape[2])
    hidden = torch.arange(len(slots)) > torch.tensor(positions)[:, None]
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (probabilities @ values).transpose(0, 1), probabilities


def batch_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
) -> Tensor:
    """All requests' rows, fp64."""
    parts = q.split([len(positions) for positions in rows])  # type: ignore[no-untyped-call]
    return torch.cat(
        [
            dense_attention(part, k_cache, v_cache, positions, blocks)[0]
            for part, positions, blocks in zip(parts, rows, tables, strict=True)
            if positions
        ]
    )
