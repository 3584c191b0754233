"""Paged attention against a loop in fp64 that reads one row and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch
from relaykv.kernels.attention_torch import TorchAttention

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
    rows: list[list[int]], tables: list[list[int]], counts: tuple[bool, ...] | None = None
) -> AttentionBatch:
    row_indptr, block_indptr = [0], [0]
    for positions, blocks in zip(rows, tables, strict=True):
        row_indptr.append(row_indptr[-1] + len(positions))
        block_indptr.append(block_indptr[-1] + len(blocks))
    return AttentionBatch(
        row_indptr=tuple(row_indptr),
        row_positions=torch.tensor([p for positions in rows for p in positions]),
        block_indptr=tuple(block_indptr),
        block_ids=torch.tensor([b for blocks in tables for b in blocks]),
        counts_influence=counts or (False,) * len(rows),
    )


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
    out = attention.run(attention.prepare(_batch(rows, tables)), q, k_cache, v_cache)
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
    out = attention.run(attention.prepare(_batch([positions], [blocks])), q, k_cache, v_cache)
    assert (out - right).abs().max() < 1e-5
    assert (out - wrong).abs().max() > 0.1


def test_bfloat16_stays_within_its_rounding() -> None:
    k_cache, v_cache = _cache(3, 64, torch.bfloat16)
    rows = [list(range(30, 60)), [100]]
    tables = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.bfloat16)
    q = torch.randn(31, 9, 64).bfloat16()
    out = attention.run(attention.prepare(_batch(rows, tables)), q, k_cache, v_cache)
    assert out.dtype is torch.bfloat16
    expected, _ = _naive(q[:30], k_cache, v_cache, rows[0], tables[0])
    assert (out[:30].double() - expected).abs().max() < 0.03
    expected, _ = _naive(q[30:], k_cache, v_cache, rows[1], tables[1])
    assert (out[30:].double() - expected).abs().max() < 0.03


def test_influence_is_the_attention_received_summed_over_heads_and_runs() -> None:
    rows, tables = [[37], [5, 6], [80]], [[3, 1, 9], [2], [8, 7, 6, 5, 4, 0]]
    k_cache, v_cache = _cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, _BLOCK, torch.float32)
    plan = attention.prepare(_batch(rows, tables, (True, True, False)))
    q = torch.randn(4, 9, 64)
    attention.run(plan, q, k_cache, v_cache)
    attention.run(plan, 2 * q, k_cache, v_cache)
    # Only decoding requests that asked: two rows are a prefill, the last did not ask.
    (influence,) = attention.influence(plan)
    _, once = _naive(q[:1], k_cache, v_cache, rows[0], tables[0])
    _, twice = _naive(2 * q[:1], k_cache, v_cache, rows[0], tables[0])
    assert torch.allclose(influence.received.double(), (once + twice).sum((0, 1)), atol=1e-5)
    slots = [tables[0][p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(38)]
    assert influence.slots.tolist() == slots
