from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relaykv.kernels.store_kv import store_kv


def naive_store(cache: Tensor, slots: list[int], rows: Tensor) -> Tensor:
    out = cache.clone()
    for row, slot in enumerate(slots):
        for head in range(cache.shape[1]):
            for dim in range(cache.shape[2]):
                out[slot, head, dim] = rows[row, head, dim]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots", [[], [3], list(range(16)), [*range(40, 56), 0], [47, 2, 31, 30, 9]]
)
def test_it_equals_a_naive_loop(slots: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    k_cache, v_cache = (torch.randn(64, 3, 8, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(len(slots), 3, 8, generator=generator).to(dtype) for _ in range(2))
    expected = naive_store(k_cache, slots, k), naive_store(v_cache, slots, v)
    store_kv(k_cache, v_cache, torch.tensor(slots, dtype=torch.int64), k, v)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_rows_may_be_a_view_of_a_fused_projection() -> None:
    k_cache, v_cache = torch.zeros(8, 2, 4), torch.zeros(8, 2, 4)
    heads = torch.arange(3 * 6 * 4, dtype=torch.float32).view(3, 6, 4)
    store_kv(k_cache, v_cache, torch.tensor([5, 1, 7]), heads[:, 2:4], heads[:, 4:])
    assert torch.equal(k_cache[[5, 1, 7]], heads[:, 2:4])
    assert torch.equal(v_cache[[5, 1, 7]], heads[:, 4:])
