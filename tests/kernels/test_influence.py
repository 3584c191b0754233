from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from relaykv.kernels.influence import add_influence

BLOCK_SIZE = 16


def attend(q: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [Hq, D], keys [n, Hkv, D] -> each key's probabilities added up [n], base-2 lse [Hq]."""
    gqa = q.shape[0] // keys.shape[1]
    received = torch.zeros(len(keys), dtype=torch.float64)
    lse = torch.zeros(q.shape[0])
    for head in range(q.shape[0]):
        scores = keys[:, head // gqa].double() @ q[head].double() * scale
        received += scores.softmax(dim=0)
        lse[head] = scores.logsumexp(dim=0) / math.log(2)
    return received, lse


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("gqa", "num_kv_heads"), [(1, 3), (3, 3), (4, 2), (7, 2)])
def test_rows_that_count_add_their_probabilities_to_shared_slots(
    gqa: int, num_kv_heads: int, index_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(gqa)
    k_cache = torch.randn(10 * BLOCK_SIZE, num_kv_heads, 64, generator=generator)
    q = torch.randn(4, gqa * num_kv_heads, 64, generator=generator)
    blocks = [[7], [7, 3], [7, 3, 8], [4, 1]]
    num_keys, counts = [1, 17, 48, 20], [1, 1, 0, 1]
    received = torch.randn(k_cache.shape[0], generator=generator)
    expected = received.double()
    lse = torch.full((4, q.shape[1]), math.nan)
    for row in (0, 1, 3):
        slots = [block * BLOCK_SIZE + i for block in blocks[row] for i in range(BLOCK_SIZE)]
        slots = slots[: num_keys[row]]
        added, lse[row] = attend(q[row], k_cache[slots], 0.125)
        expected[slots] += added
    add_influence(
        received,
        q,
        k_cache,
        lse,
        torch.tensor([block for ids in blocks for block in ids], dtype=index_dtype),
        torch.tensor([0, 1, 3, 6, 8], dtype=index_dtype),
        torch.tensor(num_keys, dtype=index_dtype),
        torch.tensor(counts, dtype=torch.int32),
        BLOCK_SIZE,
        0.125,
    )
    torch.testing.assert_close(received.double(), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_looked_at_when_no_row_counts() -> None:
    received = torch.ones(4)
    nothing = torch.zeros(2, dtype=torch.int32)
    k_cache = torch.full((4, 1, 8), math.nan)
    q = torch.zeros(2, 1, 8)
    add_influence(received, q, k_cache, q[..., 0], nothing, nothing, nothing, nothing, 4, 1.0)
    assert received.tolist() == [1.0] * 4
