from __future__ import annotations

import random

import pytest

from relaykv.engine.policy import Bands, Deviation, Selection, builtin_policies
from relaykv.engine.recompute import select_tokens

POLICIES = builtin_policies(30, Bands(2, 4, 29))


def test_an_empty_selection_chooses_nothing() -> None:
    assert select_tokens(Selection(), 50, [1.0] * 50, [1.0] * 50) == []


@pytest.mark.parametrize("length", [1, 9, 10, 11, 15, 16, 17, 100])
def test_the_first_and_last_tokens_are_clipped_to_the_segment(length: int) -> None:
    first = select_tokens(Selection(num_first=16), length, None, None)
    last = select_tokens(Selection(num_last=10), length, None, None)

    assert first == list(range(min(16, length)))
    assert last == list(range(max(length - 10, 0), length))


def test_the_union_of_first_and_last_has_no_duplicates() -> None:
    assert select_tokens(Selection(num_first=4, num_last=4), 6, None, None) == list(range(6))
    assert select_tokens(Selection(num_first=1, num_last=2), 6, None, None) == [0, 4, 5]


def test_the_deviation_factor_compares_with_the_mean_of_the_segment() -> None:
    selection = Selection(deviation=Deviation.COSINE, deviation_factor=1.5)

    assert select_tokens(selection, 4, [0.1, 0.1, 0.3, 0.1], None) == [2]
    assert select_tokens(selection, 4, [0.1] * 4, None) == []


def test_the_floor_keeps_rounding_noise_from_selecting() -> None:
    selection = Selection(deviation_factor=1.5, deviation_floor=1e-3)
    noise = [1e-7, 9e-7, 1e-7, 1e-7]

    assert select_tokens(selection, 4, noise, None) == []
    assert select_tokens(selection, 4, [v * 1e4 for v in noise], None) == [1]


def test_zero_deviation_and_zero_influence_select_nothing() -> None:
    selection = Selection(deviation_factor=1.5, influence_factor=1.45)

    assert select_tokens(selection, 3, [0.0] * 3, [0.0] * 3) == []


@pytest.mark.parametrize(("length", "count"), [(1, 1), (6, 1), (7, 2), (20, 3), (100, 15)])
def test_the_deviation_share_is_rounded_up(length: int, count: int) -> None:
    deviation = [float(i) for i in range(length)]

    chosen = select_tokens(Selection(deviation_share=0.15), length, deviation, None)

    assert chosen == list(range(length - count, length))


def test_equal_deviations_are_chosen_from_the_front() -> None:
    assert select_tokens(Selection(deviation_share=0.5), 4, [1.0] * 4, None) == [0, 1]


def test_influence_selects_what_was_attended_to_most() -> None:
    selection = Selection(influence_factor=1.45)

    assert select_tokens(selection, 4, None, [1.0, 4.0, 0.5, 0.5]) == [1]
    assert select_tokens(selection, 4, None, None) == []


def test_influence_without_a_factor_is_ignored() -> None:
    assert select_tokens(Selection(num_last=1), 3, None, [9.0, 0.0, 0.0]) == [2]


@pytest.mark.parametrize("name", ["shift", "epic", "cacheblend", "relay"])
@pytest.mark.parametrize("length", [1, 5, 32, 500])
def test_every_policy_chooses_sorted_distinct_tokens_of_the_segment(name: str, length: int) -> None:
    pick = random.Random(length)
    deviation = [pick.random() for _ in range(length)]
    influence = [pick.random() for _ in range(length)]

    chosen = select_tokens(POLICIES[name].selection, length, deviation, influence)

    assert chosen == sorted(set(chosen))
    assert all(0 <= offset < length for offset in chosen)


def test_relay_always_repairs_the_last_ten_tokens_and_the_outliers() -> None:
    deviation = [0.01] * 100
    deviation[40] = 0.5
    influence = [1.0] * 100
    influence[7] = 20.0

    chosen = select_tokens(POLICIES["relay"].selection, 100, deviation, influence)

    assert chosen == [7, 40, *range(90, 100)]
