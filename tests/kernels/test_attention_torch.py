"""Paged attention in torch against attention in fp64 that knows no pages."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    BLOCK,
    attention_batch,
    batch_attention,
    dense_attention,
    prepared,
    random_cache,
    random_tables,
)

from relaykv.kernels.attention_torch import TorchAttention

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
    tables = random_tables(len(rows))
    k_cache, v_cache = random_cache(kv_heads, 64, torch.float32)
    attention = TorchAttention(heads, kv_heads, 64, BLOCK, torch.float32)
    q = torch.randn(sum(map(len, rows)), heads, 64)
    out = attention.run(
        prepared(attention, attention_batch(rows, tables)), q, k_cache, v_cache, None
    )
    expected = batch_attention(q, k_cache, v_cache, rows, tables)
    assert (out - expected).abs().max() < 1e-5


def test_a_bottom_right_mask_would_have_been_noticed() -> None:
    # What CacheBlend's released code does: n scattered rows treated as the last n positions.
    positions, blocks = [3, 9, 30], [0, 1]
    k_cache, v_cache = random_cache(3, 64, torch.float32)
    q = torch.randn(3, 9, 64)
    right, _ = dense_attention(q, k_cache, v_cache, positions, blocks)
    wrong, _ = dense_attention(q, k_cache, v_cache, [28, 29, 30], blocks)
    attention = TorchAttention(9, 3, 64, BLOCK, torch.float32)
    plan = prepared(attention, attention_batch([positions], [blocks]))
    out = attention.run(plan, q, k_cache, v_cache, None)
    assert (out - right).abs().max() < 1e-5
    assert (out - wrong).abs().max() > 0.1


def test_bfloat16_stays_within_its_rounding() -> None:
    k_cache, v_cache = random_cache(3, 64, torch.bfloat16)
    rows = [list(range(30, 60)), [100]]
    tables = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    attention = TorchAttention(9, 3, 64, BLOCK, torch.bfloat16)
    q = torch.randn(31, 9, 64).bfloat16()
    out = attention.run(
        prepared(attention, attention_batch(rows, tables)), q, k_cache, v_cache, None
    )
    assert out.dtype is torch.bfloat16
    expected = batch_attention(q, k_cache, v_cache, rows, tables)
    assert (out.double() - expected).abs().max() < 0.03


def test_queries_may_be_a_slice_of_a_wider_projection() -> None:
    k_cache, v_cache = random_cache(3, 64, torch.float32)
    rows, tables = [[7], list(range(20, 40))], random_tables(2)
    attention = TorchAttention(9, 3, 64, BLOCK, torch.float32)
    q = torch.randn(21, 15, 64)[:, :9]
    plan = prepared(attention, attention_batch(rows, tables, num_decodes=1))
    out = attention.run(plan, q, k_cache, v_cache, None)
    assert torch.equal(out, attention.run(plan, q.contiguous(), k_cache, v_cache, None))


def test_influence_is_the_attention_that_decoding_rows_give_summed_over_heads_and_runs() -> None:
    rows = [[37], [80], [5, 6], [20]]
    tables = [[3, 1, 9], [8, 7, 6, 5, 4, 0], [2], [11, 12]]
    counts = [True, False, True, True]
    k_cache, v_cache = random_cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, BLOCK, torch.float32)
    plan = prepared(attention, attention_batch(rows, tables, num_decodes=2, counts=counts))
    q = torch.randn(5, 9, 64)
    received = torch.zeros(len(k_cache))
    attention.run(plan, q, k_cache, v_cache, received)
    attention.run(plan, 2 * q, k_cache, v_cache, received)
    attention.run(plan, q, k_cache, v_cache, None)
    # Only decodes that asked: the second did not ask, the last two are prefills.
    _, once = dense_attention(q[:1], k_cache, v_cache, rows[0], tables[0])
    _, twice = dense_attention(2 * q[:1], k_cache, v_cache, rows[0], tables[0])
    slots = [tables[0][p // BLOCK] * BLOCK + p % BLOCK for p in range(38)]
    expected = torch.zeros(len(k_cache), dtype=torch.float64)
    expected[slots] = (once + twice).sum((0, 1))
    assert torch.allclose(received.double(), expected, atol=1e-5)


def test_influence_of_decodes_that_share_blocks_adds_up() -> None:
    rows, tables = [[37], [20]], [[3, 1, 9], [3, 1]]
    k_cache, v_cache = random_cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, BLOCK, torch.float32)
    plan = prepared(attention, attention_batch(rows, tables, num_decodes=2, counts=[True, True]))
    received = torch.zeros(len(k_cache))
    attention.run(plan, torch.randn(2, 9, 64), k_cache, v_cache, received)
    # Each row hands out one whole per head.
    assert float(received.sum()) == pytest.approx(18, abs=1e-4)
    assert (received[3 * BLOCK : 4 * BLOCK] > 0).all()


def test_nothing_to_attend_gives_nothing() -> None:
    k_cache, v_cache = random_cache(3, 64, torch.float32)
    attention = TorchAttention(9, 3, 64, BLOCK, torch.float32)
    plan = prepared(attention, attention_batch([[]], [[1]]))
    assert attention.run(plan, torch.empty(0, 9, 64), k_cache, v_cache, None).shape == (0, 9, 64)
