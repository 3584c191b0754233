"""`influence` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from relaykv.kernels import influence_triton
from relaykv.kernels.influence import add_influence
from relaykv.kernels.influence_triton import add_influence_triton

BLOCK_SIZE = 16
# Rows of one key, a full block, a block plus one, and more keys than fit a tile.
NUM_KEYS = [1, 16, 17, 300]
# The first three share their first block; blocks of a row stand in no order.
BLOCKS = [[5], [5], [5, 2], [*range(30, 12, -1), 1]]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the interpreter take milliseconds each; two a row share out its tiles."""
    monkeypatch.setattr(influence_triton, "_MAX_PROGRAMS", 1)
    monkeypatch.setattr(influence_triton, "_MIN_ROW_PROGRAMS", 2)


def log_sum_exp(q: Tensor, k_cache: Tensor, scale: float) -> Tensor:
    """Of each row, base 2, [n, Hq]."""
    gqa = q.shape[1] // k_cache.shape[1]
    rows = []
    for row, blocks, num_keys in zip(q.float(), BLOCKS, NUM_KEYS, strict=True):
        slots = [block * BLOCK_SIZE + i for block in blocks for i in range(BLOCK_SIZE)]
        keys = k_cache[slots[:num_keys]].float().repeat_interleave(gqa, dim=1)
        scores = torch.einsum("hd,khd->hk", row, keys) * scale
        rows.append(scores.logsumexp(dim=-1) / math.log(2))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("gqa", "num_kv_heads", "head_dim"), [(1, 3, 64), (3, 3, 64), (4, 2, 128), (7, 1, 96)]
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_it_adds_what_plain_torch_adds(
    index_dtype: torch.dtype, gqa: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    scale = head_dim**-0.5
    k_cache = torch.randn(32 * BLOCK_SIZE, num_kv_heads, head_dim).to(dtype)
    fused = torch.randn(4, (gqa + 2) * num_kv_heads, head_dim).to(dtype)
    q = fused[:, : gqa * num_kv_heads]
    lse = log_sum_exp(q, k_cache, scale)
    lengths = torch.tensor([0, *map(len, BLOCKS)])
    block_indptr = lengths.cumsum(0).to(index_dtype)
    block_ids = torch.tensor([block for blocks in BLOCKS for block in blocks], dtype=index_dtype)
    num_keys = torch.tensor(NUM_KEYS, dtype=index_dtype)
    # What a row holds that does not count is never looked at.
    counts = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    num_keys[1] = 2**31 - 1
    lse[1] = -math.inf
    expected = torch.randn(k_cache.shape[0])
    found = expected.clone()
    before = expected.clone()
    args = (q, k_cache, lse, block_ids, block_indptr, num_keys, counts, BLOCK_SIZE, scale)
    add_influence(expected, *args)
    add_influence_triton(found, *args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    # Every head of every row that counts gives away a probability of 1 in all.
    torch.testing.assert_close((found - before).sum().item(), 3.0 * q.shape[1], rtol=1e-3, atol=0)
    assert torch.equal(found[: 1 * BLOCK_SIZE], before[: 1 * BLOCK_SIZE])


def test_queries_whose_dimensions_are_apart_are_refused() -> None:
    apart, index = torch.zeros(1, 2, 128)[..., ::2], torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="not dense"):
        add_influence_triton(
            torch.zeros(16),
            apart,
            torch.zeros(16, 2, 64),
            torch.zeros(1, 2),
            index,
            index,
            index,
            index,
            BLOCK_SIZE,
            1.0,
        )
