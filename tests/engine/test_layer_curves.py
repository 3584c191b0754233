from __future__ import annotations

import numpy as np
import pytest

from relaykv.engine.layer_curves import (
    LayerCurves,
    handoff_curves,
    mean_curves,
    rank_correlation,
)


def test_the_rank_correlation_is_that_of_a_worked_example() -> None:
    # Ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * (1 + 1 + 1 + 1) / (5 * 24)
    a = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    b = np.array([2.0, 1.0, 40.0, 3.0, 500.0])

    assert rank_correlation(a, b) == pytest.approx(0.8)
    assert rank_correlation(a, a**3) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)


def test_equal_values_share_their_mean_rank() -> None:
    # Ranks 1.5 1.5 3 4 and 1 2 3 4, so Pearson of those: 4.5 / sqrt(4.5 * 5)
    a = np.array([0.0, 0.0, 1.0, 2.0])
    b = np.array([1.0, 2.0, 3.0, 4.0])

    assert rank_correlation(a, b) == pytest.approx(4.5 / np.sqrt(4.5 * 5.0))


def test_what_ranks_nothing_correlates_with_nothing() -> None:
    assert rank_correlation(np.zeros(4), np.arange(4.0)) == 0.0
    assert rank_correlation(np.ones(1), np.ones(1)) == 0.0


def test_a_handoffs_curves_are_means_over_its_tokens_and_rounding_ranks_nothing() -> None:
    values = np.array([[1e-9, 2e-9, 3e-9], [0.1, 0.2, 0.3], [0.2, 0.4, 0.9]])
    keys = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.3], [0.3, 0.3, 0.3]])

    curves = handoff_curves(values, keys, rounding=1e-6)

    np.testing.assert_allclose(curves.value_similarity, [1.0, 0.8, 0.5], atol=1e-8)
    np.testing.assert_allclose(curves.key_similarity, [1.0, 0.9, 0.7])
    np.testing.assert_allclose(curves.rank_correlation, [0.0, 0.0, 1.0])


def test_handoffs_have_the_same_weight_in_the_mean() -> None:
    def curves(value: float) -> LayerCurves:
        return LayerCurves(np.full(2, value), np.full(2, value / 2), np.full(2, value / 4))

    mean = mean_curves([curves(1.0), curves(0.0), curves(0.5)])

    np.testing.assert_allclose(mean.value_similarity, 0.5)
    np.testing.assert_allclose(mean.key_similarity, 0.25)
    np.testing.assert_allclose(mean.rank_correlation, 0.125)


def test_curves_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one number per layer"):
        LayerCurves(np.ones(3), np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="one number per layer"):
        LayerCurves(np.ones(0), np.ones(0), np.ones(0))
