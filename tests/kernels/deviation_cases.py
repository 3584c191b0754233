"""`deviation` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from relaykv.kernels.deviation import cosine_deviation, squared_deviation
from relaykv.kernels.deviation_triton import cosine_deviation_triton, squared_deviation_triton

Deviation = Callable[[Tensor, Tensor, Tensor], Tensor]

PAIRS: list[tuple[Deviation, Deviation]] = [
    (cosine_deviation, cosine_deviation_triton),
    (squared_deviation, squared_deviation_triton),
]


@pytest.mark.parametrize(("twin", "kernel"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 64), (5, 96), (3, 128)])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_measures_what_plain_torch_measures(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    twin: Deviation,
    kernel: Deviation,
) -> None:
    cache = torch.randn(64, num_kv_heads, head_dim).to(dtype)
    slots = torch.randperm(64)[:num_tokens]
    fused = torch.randn(num_tokens, 4 + num_kv_heads, head_dim).to(dtype)
    fresh = fused[:, 4:]
    fresh[: num_tokens // 2] += cache[slots[: num_tokens // 2]]
    torch.testing.assert_close(
        kernel(fresh, cache, slots), twin(fresh, cache, slots), rtol=1e-5, atol=1e-6
    )


def test_zero_vectors_and_equal_ones_deviate_as_in_plain_torch() -> None:
    cache = torch.randn(16, 3, 64)
    slots = torch.tensor([9, 4])
    fresh = cache[slots]
    fresh[0] = 0
    cosine = cosine_deviation_triton(fresh, cache, slots)
    assert cosine[0] == 1.0
    assert cosine[1].abs() < 1e-6
    assert squared_deviation_triton(fresh, cache, slots)[1] == 0.0


def test_values_whose_dimensions_are_apart_are_refused() -> None:
    cache = torch.zeros(4, 2, 64)
    with pytest.raises(ValueError, match="not dense"):
        cosine_deviation_triton(torch.zeros(1, 2, 128)[..., ::2], cache, torch.tensor([1]))
