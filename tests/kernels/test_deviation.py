"""Deviation of value vectors against loops over heads."""

from __future__ import annotations

import math

import pytest
import torch

from relaykv.kernels.deviation import cosine_deviation, squared_deviation


@pytest.mark.parametrize("num_tokens", [1, 16, 17])
def test_cosine_deviation_is_one_minus_the_mean_cosine_over_heads(num_tokens: int) -> None:
    fresh, relayed = torch.randn(2, num_tokens, 3, 64)
    for token in range(num_tokens):
        cosines = [
            float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
            for a, b in zip(fresh[token], relayed[token], strict=True)
        ]
        found = float(cosine_deviation(fresh, relayed)[token])
        assert found == pytest.approx(1 - sum(cosines) / 3, abs=1e-5)


def test_cosine_deviation_ignores_length_and_survives_zero_vectors() -> None:
    values = torch.randn(5, 2, 8)
    assert cosine_deviation(3 * values, values).abs().max() < 1e-6
    assert cosine_deviation(torch.zeros(1, 2, 8), values[:1]).item() == 1.0


def test_squared_deviation_sums_over_heads_and_dimensions() -> None:
    fresh, relayed = torch.randn(2, 7, 3, 16)
    expected = [float(((a - b) ** 2).sum()) for a, b in zip(fresh, relayed, strict=True)]
    assert squared_deviation(fresh, relayed).tolist() == pytest.approx(expected, rel=1e-5)


def test_bfloat16_values_are_compared_in_fp32() -> None:
    fresh = torch.randn(4, 2, 16).bfloat16()
    assert squared_deviation(fresh, fresh).tolist() == [0.0] * 4
    assert cosine_deviation(fresh, fresh).dtype is torch.float32
