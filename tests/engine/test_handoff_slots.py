from __future__ import annotations

from collections.abc import Sequence

import pytest

from relaykv.engine.batch import HoldoutError
from relaykv.engine.handoff_slots import (
    MIN_OBSERVATIONS,
    NUM_LEVELS,
    HandoffKey,
    HandoffSlots,
)

GOOD = HoldoutError(0.4, 0.5)


def _key(
    receiver: str = "critic", glue: Sequence[int] = (1, 2), producer: str = "writer"
) -> HandoffKey:
    return HandoffKey("tenant", receiver, tuple(glue), producer)


def _observe(table: HandoffSlots, key: HandoffKey, *errors: HoldoutError) -> None:
    for error in errors:
        trial = table.observe(key)
        table.take(trial, [error] * NUM_LEVELS)


def test_a_kind_is_corrected_once_it_was_observed_often_enough_with_small_errors() -> None:
    table = HandoffSlots(9)
    for count in range(MIN_OBSERVATIONS):
        verdict = table.judge(_key())
        assert verdict.offset_index is None
        assert f"observed {'once' if count == 1 else f'{count} times'}" in verdict.why
        _observe(table, _key(), GOOD)
    verdict = table.judge(_key())
    assert verdict.offset_index is not None
    assert "4 observations of hand-offs of this kind" in verdict.why
    assert "0.40 of the squared error of keys and 0.50" in verdict.why


@pytest.mark.parametrize("bad", [HoldoutError(0.95, 0.5), HoldoutError(0.4, 1.05)])
def test_a_mean_that_leaves_too_much_is_not_used(bad: HoldoutError) -> None:
    table = HandoffSlots(9)
    _observe(table, _key(), *(bad,) * 6)
    verdict = table.judge(_key())
    assert verdict.offset_index is None
    assert "the mean of 6 observations left" in verdict.why


def test_the_first_observation_tests_nothing() -> None:
    table = HandoffSlots(9)
    _observe(table, _key(), HoldoutError(50.0, 50.0), GOOD, GOOD, GOOD)
    slot = table.get(_key())
    assert slot is not None
    assert slot.num_errors == 3
    assert slot.key_error == pytest.approx(0.4)
    assert table.judge(_key()).offset_index == slot.offset_index


def test_a_mean_that_goes_stale_is_found_out() -> None:
    table = HandoffSlots(9)
    _observe(table, _key(), *(GOOD,) * 100)
    _observe(table, _key(), *(HoldoutError(2.0, 2.0),) * 4)
    assert table.judge(_key()).offset_index is None


def test_a_new_kind_falls_back_to_what_held_for_several_others() -> None:
    table = HandoffSlots(30)
    for number in range(MIN_OBSERVATIONS + 1):
        _observe(table, _key(producer=f"writer {number}"), GOOD)
    verdict = table.judge(_key(producer="a new one"))
    assert verdict.offset_index is not None
    assert "to this kind of reader behind the same words" in verdict.why
    assert table.judge(_key(receiver="another reader")).offset_index is None


def test_one_kind_alone_does_not_vouch_for_others() -> None:
    table = HandoffSlots(30)
    _observe(table, _key(), *(GOOD,) * 20)
    assert table.judge(_key()).offset_index is not None
    assert table.judge(_key(producer="a new one")).offset_index is None
    assert table.judge(_key(glue=(9, 9))).offset_index is None


def test_kinds_of_different_tenants_know_nothing_of_each_other() -> None:
    table = HandoffSlots(9)
    _observe(table, _key(), *(GOOD,) * 6)
    other = HandoffKey("another", "critic", (1, 2), "writer")
    assert table.judge(other).offset_index is None


def test_every_fourth_hand_off_is_due_until_the_kind_is_known_then_every_fiftieth() -> None:
    table = HandoffSlots(9)
    due = []
    for number in range(1, 131):
        if table.judge(_key()).is_due:
            due.append(number)
            _observe(table, _key(), GOOD)
        table.count(_key())
    assert due == [4, 8, 12, 16, 50, 100]


def test_the_least_recently_met_kind_gives_way_and_its_mean_is_used_again() -> None:
    table = HandoffSlots(2 * NUM_LEVELS)
    keys = [_key(receiver=name) for name in ("a", "b", "c")]
    for key in keys[:2]:
        table.count(key)
    table.count(keys[0])
    table.count(keys[2])
    assert table.get(keys[1]) is None
    assert len(table) == 2 * NUM_LEVELS
    indices = {slot.offset_index for key in keys for k in key.levels() if (slot := table.get(k))}
    assert indices == set(range(2 * NUM_LEVELS))


def test_a_forgotten_kind_starts_from_nothing() -> None:
    table = HandoffSlots(NUM_LEVELS)
    _observe(table, _key(), *(GOOD,) * 6)
    table.forget(_key())
    assert len(table) == 0
    assert table.observe(_key()).lessons[0].num_observations == 0


def test_a_trial_whose_kind_was_dropped_meanwhile_harms_nobody() -> None:
    table = HandoffSlots(NUM_LEVELS)
    table.observe(_key())
    trial = table.observe(_key())
    table.count(_key(receiver="another"))
    table.take(trial, [HoldoutError(9.0, 9.0)] * NUM_LEVELS)
    slot = table.get(_key(receiver="another"))
    assert slot is not None
    assert slot.num_errors == 0


def test_a_table_too_small_for_one_hand_off_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        HandoffSlots(NUM_LEVELS - 1)
