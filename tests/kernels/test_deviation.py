"""Deviation of value vectors against loops over heads."""

from __future__ import annotations

import math

import pytest
import torch

from relaykv.kernels.deviation import cosine_deviation, squared_deviation


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_cosine_deviation_is_one_minus_the_mean_cosine_over_heads(num_tokens: int) -> None:
    fresh, cache = torch.randn(num_tokens, 3, 64), torch.randn(32, 3, 64)
    slots = torch.randperm(32)[:num_tokens]
    found = cosine_deviation(fresh, cache, slots)
    assert found.shape == (num_tokens,)
    for token in range(num_tokens):
        cosines = [
            float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
            for a, b in zip(fresh[token], cache[slots[token]], strict=True)
        ]
        assert float(found[token]) == pytest.approx(1 - sum(cosines) / 3, abs=1e-5)


def test_cosine_deviation_ignores_length_and_survives_zero_vectors() -> None:
    values, slots = torch.randn(5, 2, 8), torch.arange(5)
    assert cosine_deviation(3 * values, values, slots).abs().max() < 1e-6
    assert cosine_deviation(torch.zeros(1, 2, 8), values, slots[:1]).item() == 1.0


def test_squared_deviation_sums_over_heads_and_dimensions() -> None:
    fresh, cache = torch.randn(2, 7, 3, 16)
    slots = torch.randperm(7)
    expected = [float(((a - b) ** 2).sum()) for a, b in zip(fresh, cache[slots], strict=True)]
    assert squared_deviation(fresh, cache, slots).tolist() == pytest.approx(expected, rel=1e-5)


def test_bfloat16_values_are_compared_in_fp32() -> None:
    fresh, slots = torch.randn(4, 2, 16).bfloat16(), torch.arange(4)
    assert squared_deviation(fresh, fresh, slots).tolist() == [0.0] * 4
    assert cosine_deviation(fresh, fresh, slots).dtype is torch.float32
