"""Sums of scores, by hand-computed values."""

from __future__ import annotations

import pytest

from relaykv.engine.bootstrap import Interval
from relaykv.engine.fidelity_scores import (
    Score,
    Summary,
    common_share,
    computed_share,
    is_published,
    summarise,
)


def score(case: str, policy: str, kl: float, computed: float, **fields: float | bool) -> Score:
    values = {"next_token": 1.0, "greedy": 1.0, "same_answer": True, "first_kl": 0.0, **fields}
    return Score(case, policy, 100, 50, computed, kl, **values)  # type: ignore[arg-type]


def by_policy(*scores: Score) -> dict[str, Summary]:
    return {summary.policy: summary for summary in summarise(scores)}


@pytest.mark.parametrize(
    ("reference", "other", "share"),
    [
        ((5, 6, 7, 8), (5, 6, 7, 8), 1.0),
        ((5, 6, 7, 8), (5, 6, 1, 8), 0.5),
        ((5, 6, 7, 8), (1, 6, 7, 8), 0.0),
        ((5, 6), (5, 6, 7), 1.0),
        ((5, 6, 7, 8), (5,), 0.25),
    ],
)
def test_only_what_stands_before_the_first_difference_is_common(
    reference: tuple[int, ...], other: tuple[int, ...], share: float
) -> None:
    assert common_share(reference, other) == share


def test_matched_text_that_is_not_relayed_counts_as_computed() -> None:
    assert computed_share(relayed=40, recomputed_share=0.25, matched=40) == 0.25
    assert computed_share(relayed=30, recomputed_share=0.2, matched=40) == pytest.approx(0.4)
    assert computed_share(relayed=0, recomputed_share=0.0, matched=40) == 1.0


def test_a_summary_is_the_mean_over_cases() -> None:
    found = by_policy(
        score("a", "shift", 0.2, 0.0, first_kl=0.4, next_token=0.5, greedy=0.25, same_answer=False),
        score("b", "shift", 0.4, 0.1, first_kl=0.2, next_token=1.0, greedy=1.0, same_answer=True),
    )
    shift = found["shift"]
    assert shift.kl == pytest.approx(0.3)
    assert shift.first_kl == pytest.approx(0.3)
    assert shift.computed_share == pytest.approx(0.05)
    assert (shift.next_token, shift.greedy, shift.same_answer) == (0.75, 0.625, 0.5)
    assert shift.kl_interval == Interval(0.2, 0.4)
    assert (shift.rival, shift.ratio, shift.right) == (None, None, None)


def test_right_answers_are_counted_only_where_something_was_asked() -> None:
    found = by_policy(
        score("a", "shift", 0.2, 0.0, right=True),
        score("b", "shift", 0.2, 0.0),
        score("c", "shift", 0.2, 0.0, right=False),
    )
    assert found["shift"].right == 0.5


def test_the_rival_is_the_best_published_policy_that_computes_as_much_or_less() -> None:
    found = by_policy(
        *(score(case, "shift", 0.4, 0.0) for case in "ab"),
        *(score(case, "epic", 0.1, 0.1) for case in "ab"),
        *(score(case, "relay", 0.2, 0.2) for case in "ab"),
        *(score(case, "relay 1,3,9", 0.01, 0.4) for case in "ab"),
        *(score(case, "learned", 0.02, 0.1) for case in "ab"),
        *(score(case, "auto", 0.05, 0.2) for case in "ab"),
    )
    assert {name: summary.rival for name, summary in found.items()} == {
        "shift": None,
        "epic": "shift",
        "relay": "epic",  # not `learned`, which is not published
        "relay 1,3,9": "epic",
        "learned": "epic",
        "auto": "epic",
    }
    assert found["auto"].ratio == pytest.approx(0.5)
    interval = found["auto"].ratio_interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.5, 0.5))


def test_a_rival_without_any_divergence_has_no_ratio() -> None:
    found = by_policy(score("a", "shift", 0.0, 0.0), score("a", "epic", 0.1, 0.1))
    assert (found["epic"].rival, found["epic"].ratio) == ("shift", None)
    assert found["epic"].ratio_interval is None


def test_settings_behind_a_published_name_do_not_change_who_published_it() -> None:
    assert is_published("relay 1,3,18")
    assert not is_published("relayed")
    assert not is_published("auto")
