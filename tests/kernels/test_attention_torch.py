"""Paged attention against a loop in fp64 that reads one row and one key at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch
from relaykv.kernels.attention_torch import TorchAttention, TorchAttentionPlan

_BLOCK = 16


def _naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: list[int], blocks: list[int]
) -> tuple[Tensor, Tensor]:
    """Row by row; also the probabilities [rows, heads, keys of the longest row]."""
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    received = torch.zeros(len(positions), num_heads, max(positions) + 1, dtype=torch.float64)
    for row, position in enumerate(positions):
        slots = [blocks[p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(position + 1)]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            keys, values = k_cache[slots, kv_head].double(), v_cache[slots, kv_head].double()
            scores = keys @ q[row, head].double() / math.sqrt(q.shape[2])
            weights = scores.softmax(0)
            received[row, head, : position + 1] = weights
            out[row, head] = weights @ values
    return out, received


def _cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (40 * _BLOCK, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return k.to(dtype), v.to(dtype)


def _batch(
    rows: list[list[int]],
    tables: list[list[int]],
    counts: tuple[bool, ...] | None = None,
    num_decodes: int = 0,
) -> AttentionBatch:
    row_indptr, block_indptr = [0], [0]
    for positions, blocks in zip(rows, tables, strict=True):
        row_indptr.append(row_indptr[-1] + len(positions))
        block_indptr.append(block_indptr[-1] + len(blocks))
    return AttentionBatch(
        row_indptr=np.array(row_indptr),
        row_positions=np.array([p for positions in rows for p in positions], dtype=np.int64),
        block_indptr=np.array(block_indptr),
        block_ids=np.array([b for blocks in tables for b in blocks], dtype=np.int64),
        counts_influence=counts or (False,) * len(rows),
        num_decodes=num_decodes,
        num_dense=0,
    )


def _prepared(attention: TorchAttention, batch: AttentionBatch) -> TorchAttentionPlan:
    layout = attention.layout(batch)
    return attention.prepare(layout, [torch.from_numpy(array) for array in layout.arrays])


_ROWS = {
    "one token": [[0]],
    "one token far on": [[200]],
    "a full block": [list(range(16))],
    "a block plus one": [list(range(17))],
    "decodes of different lengths": [[3], [16], [15], [130]],
    "a chunk behind a prefix": [list(range(70, 170))],
    "scattered rows of two segments": [[4, 5, 6, 40, 41, 90, 127, 128, 200]],
    "more rows than a group": [[2 * i for i in range(90)]],
    "a mixed batch": [[7], list(range(20, 90)), [33, 34, 36], [199]],
    "a request without rows": [[5], [], [9, 10]],
}


@pytest.mark.parametrize("name", list(_ROWS))
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (14, 2), (8, 1)])
def test_rows_attend_to_the_keys_at_or_before_their_position(
    name: str, heads: int, kv_heads: int
) -> None:
    rows = _ROWS[name]
    k_cache, v_cache = _cache(kv_heads, 64, torch.float32)
    tables = [[(7 * i + 13 * r) % 40 for i in range(13)] for r in range(len(rows))]
    attention = TorchAttention(heads, kv_heads, 64, _BLOCK, torch.float32)
    q = torch.randn(sum(len(r) for r in rows), heads, 64)
    out = attention.run(_prepared(attention, _batch(rows, tables)), q, k_cache, v_cache, None)
    start = 0
    for positions, blocks in zip(rows, tables, strict=True):
        stop = start + len(positions)
        if positions:
            expected, _ = _naive(q[start:stop], k_cache, v_cache, positions, blocks)
            assert (out[start:stop] - expected).abs().max() < 1e-5
        start = stop


def test_a_bottom_right_mask_would_have_been_noticed() -> None:
    # What CacheBlend's released code does: n scattered rows treated as the last n positions.
    positions, blocks = [3, 9, 30], [0, 1]
    k_cache, v_cache = _cache(3, 64, torch.float32)
    q = torch.randn(3, 9, 64)
    right, _ = _naive(q, k_cache, v_cache, positions, blocks)
    wrong, _ = _naive(q, k_cache, v_cache, [28, 29, 30], blocks)
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.float32)
    out = attention.run(
        _prepared(attention, _batch([positions], [blocks])), q, k_cache, v_cache, None
    )
    assert (out - right).abs().max() < 1e-5
    assert (out - wrong).abs().max() > 0.1


def test_bfloat16_stays_within_its_rounding() -> None:
    k_cache, v_cache = _cache(3, 64, torch.bfloat16)
    rows = [list(range(30, 60)), [100]]
    tables = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.bfloat16)
    q = torch.randn(31, 9, 64).bfloat16()
    out = attention.run(_prepared(attention, _batch(rows, tables)), q, k_cache, v_cache, None)
    assert out.dtype is torch.bfloat16
    expected, _ = _naive(q[:30], k_cache, v_cache, rows[0], tables[0])
    assert (out[:30].double() - expected).abs().max() < 0.03
    expected, _ = _naive(q[30:], k_cache, v_cache, rows[1], tables[1])
    assert (out[30:].double() - expected).abs().max() < 0.03


def test_influence_is_the_attention_that_decoding_rows_give_summed_over_heads_and_runs() -> None:
    rows = [[37], [80], [5, 6], [20]]
    tables = [[3, 1, 9], [8, 7, 6, 5, 4, 0], [2], [11, 12]]
    k_cache, v_cache = _cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.float32)
    plan = _prepared(attention, _batch(rows, tables, (True, False, True, True), num_decodes=2))
    q = torch.randn(5, 9, 64)
    received = torch.zeros(len(k_cache))
    attention.run(plan, q, k_cache, v_cache, received)
    attention.run(plan, 2 * q, k_cache, v_cache, received)
    attention.run(plan, q, k_cache, v_cache, None)
    # Only decodes that asked: the second did not ask, the last two are prefills.
    _, once = _naive(q[:1], k_cache, v_cache, rows[0], tables[0])
    _, twice = _naive(2 * q[:1], k_cache, v_cache, rows[0], tables[0])
    slots = [tables[0][p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(38)]
    expected = torch.zeros(len(k_cache), dtype=torch.float64)
    expected[slots] = (once + twice).sum((0, 1))
    assert torch.allclose(received.double(), expected, atol=1e-5)


def test_influence_of_decodes_that_share_blocks_adds_up() -> None:
    rows, tables = [[37], [20]], [[3, 1, 9], [3, 1]]
    k_cache, v_cache = _cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.float32)
    plan = _prepared(attention, _batch(rows, tables, (True, True), num_decodes=2))
    received = torch.zeros(len(k_cache))
    attention.run(plan, torch.randn(2, 9, 64), k_cache, v_cache, received)
    # Each row hands out one whole per head.
    assert float(received.sum()) == pytest.approx(18, abs=1e-4)
    assert (received[3 * _BLOCK : 4 * _BLOCK] > 0).all()


def test_nothing_to_attend_gives_nothing() -> None:
    k_cache, v_cache = _cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.float32)
    plan = _prepared(attention, _batch([[]], [[1]]))
    assert attention.run(plan, torch.empty(0, 9, 64), k_cache, v_cache, None).shape == (0, 9, 64)
