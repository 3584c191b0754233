"""`store_kv` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.store_kv import store_kv
from relaykv.kernels.store_kv_triton import store_kv_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 64), (2, 96), (3, 128)])
@pytest.mark.parametrize("slots", [[], [3], list(range(16)), [*range(40, 56), 0]])
def test_it_writes_what_plain_torch_writes(
    slots: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    num_heads = 4
    k_cache, v_cache = torch.randn(2, 64, num_kv_heads, head_dim).to(dtype)
    fused = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    k = fused[:, num_heads : num_heads + num_kv_heads]
    v = fused[:, num_heads + num_kv_heads :].contiguous()
    index = torch.tensor(slots, dtype=torch.int64)
    expected = k_cache.clone(), v_cache.clone()
    store_kv(*expected, index, k, v)
    store_kv_triton(k_cache, v_cache, index, k, v)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_rows_whose_heads_are_apart_are_refused() -> None:
    cache = torch.zeros(8, 2, 64)
    apart = torch.zeros(1, 4, 64)[:, ::2]
    with pytest.raises(ValueError, match="not dense"):
        store_kv_triton(cache, cache.clone(), torch.tensor([1]), apart, torch.zeros(1, 2, 64))
