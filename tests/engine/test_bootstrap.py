"""Intervals of means and of ratios of means, where they are known."""

from __future__ import annotations

import numpy as np
import pytest

from relaykv.engine.bootstrap import Interval, PairedBootstrap


def test_cases_that_do_not_differ_leave_nothing_uncertain() -> None:
    bootstrap = PairedBootstrap(np.full((5, 2), [0.25, 0.5]))

    assert bootstrap.mean(0) == Interval(0.25, 0.25)
    assert bootstrap.ratio(0, 1) == Interval(0.5, 0.5)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution_with_many_cases() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(400, 1))
    interval = PairedBootstrap(values).mean(0)

    around = 1.96 * float(values.std()) / 400**0.5
    assert interval.low == pytest.approx(float(values.mean()) - around, abs=0.02)
    assert interval.high == pytest.approx(float(values.mean()) + around, abs=0.02)


def test_a_ratio_is_certain_where_cases_differ_but_all_by_the_same_factor() -> None:
    values = np.random.default_rng(2).exponential(size=20)
    bootstrap = PairedBootstrap(np.stack([0.6 * values, values], axis=1))

    ratio = bootstrap.ratio(0, 1)
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((0.6, 0.6))
    alone = bootstrap.mean(1)
    assert alone.high - alone.low > 0.3


def test_two_cases_give_the_draws_one_can_count() -> None:
    # Both the first, both the second, or one of each: 1/4, 1/4 and 1/2 of all draws.
    interval = PairedBootstrap(np.array([[0.0], [1.0]])).mean(0)
    assert interval == Interval(0.0, 1.0)


def test_a_ratio_to_a_mean_that_may_be_zero_is_not_told() -> None:
    assert PairedBootstrap(np.array([[1.0, 0.0], [1.0, 2.0]])).ratio(0, 1) is None


def test_draws_are_the_same_every_time() -> None:
    values = np.random.default_rng(3).exponential(size=(9, 1))
    assert PairedBootstrap(values).mean(0) == PairedBootstrap(values).mean(0)
