"""Choices of judges and of turned roles on a random model, and the sums of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planted_model import planted_handoffs, prompt
from readable_model import readable_parts

from relaykv.engine.assembly import EngineParts
from relaykv.engine.choice_fidelity import ChoiceFidelity
from relaykv.engine.choice_report import (
    ChoiceReport,
    ChoiceScore,
    markdown,
    summarise_choices,
)
from relaykv.engine.choice_trial import ChoiceTrial
from relaykv.engine.fidelity_report import Subject
from relaykv.engine.handoff import HandoffError
from relaykv.engine.policy import Bands, Deviation, Policy, Selection

_ALL = Policy(
    "all", True, Bands(0, 0, 2), Selection(deviation=Deviation.COSINE, deviation_share=1.0)
)


def random_parts() -> EngineParts:
    parts = readable_parts()
    return replace(parts, policies={**parts.policies, "all": _ALL})


def trials(turned: str | None = None) -> list[ChoiceTrial]:
    """Two hand-offs with two producers each."""
    handoffs = [handoff for handoff in planted_handoffs(6) if handoff.producers[1:]]
    return [ChoiceTrial(handoff, ("A", "B"), turned) for handoff in handoffs]


def measure(
    some: Sequence[ChoiceTrial], policies: Sequence[str], num_tokens: int = 64
) -> list[list[ChoiceScore]]:
    fidelity = ChoiceFidelity(random_parts(), prompt, some, policies, num_tokens)
    steps: list[float] = []
    scores = list(fidelity.measure(steps.append))
    assert sum(steps) == pytest.approx(len(some))
    assert fidelity.core.stats().num_recorded_blocks == 0
    return scores


def test_judges_read_candidates_in_every_order_under_every_policy() -> None:
    scores = measure(trials(), ["shift", "all"])

    assert [of[0].trial for of in scores] == ["handoff 2", "handoff 5"]
    for of in scores:
        assert [s.policy for s in of] == ["full", "shift", "all"] * 2
        assert {s.variant for s in of} == {"12", "21"}
        for score in of:
            assert score.right is None
            if score.policy == "shift":
                assert score.kl > 0.0
                assert score.computed_share == 0.0
            else:
                assert score.kl < 1e-6
                assert score.computed_share == 1.0
                assert score.same


def test_a_turned_role_is_read_beside_the_own_one() -> None:
    scores = measure(trials("another role with other words"), ["all"])

    for of in scores:
        assert [(s.variant, s.policy) for s in of] == [
            (variant, policy)
            for variant in ("own role", "turned role")
            for policy in ("full", "all")
        ]
        own, _, turned, _ = of
        assert own.right == (own.place == 0)
        assert turned.right == (turned.place == 1)
        assert (own.log_odds > 0) == (own.place == 0)
        assert (turned.log_odds > 0) == (turned.place == 1)
        # The two readings are of different prompts.
        assert own.log_odds != pytest.approx(-turned.log_odds)


def test_trials_that_relay_nothing_give_no_scores() -> None:
    assert measure(trials(), ["shift"], num_tokens=20) == []


def test_choices_that_begin_with_the_same_token_are_refused() -> None:
    some = [replace(trial, choices=("Ab", "Ac")) for trial in trials()]
    with pytest.raises(HandoffError, match="'handoff 2': this model's first tokens"):
        ChoiceFidelity(random_parts(), prompt, some, ["shift"], 64)


def score(trial: str, variant: str, policy: str, place: int, odds: float) -> ChoiceScore:
    right = None if variant.isdecimal() else (place == 1) == (variant == "turned role")
    return ChoiceScore(
        trial, variant, policy, float(policy == "full"), place, place == 0, 0.5, right, odds
    )


def report(scores: list[ChoiceScore]) -> ChoiceReport:
    subject = Subject("tiny", "abc", "float32", "relaykv fidelity --test flip")
    return ChoiceReport(subject, 3, tuple(summarise_choices(scores)), tuple(scores))


def test_summaries_of_turned_roles_by_hand() -> None:
    scores = [
        score("a", "own role", "shift", 0, 1.0),
        score("a", "turned role", "shift", 0, -0.5),
        score("b", "own role", "shift", 0, 2.0),
        score("b", "turned role", "shift", 1, 0.5),
    ]
    (shift,) = summarise_choices(scores)

    assert shift.right == 0.75
    assert shift.same == 0.75
    assert (shift.same_interval.low, shift.same_interval.high) == (0.5, 1.0)
    assert shift.turn == pytest.approx((0.5 + 2.5) / 2)


def test_the_table_of_turned_roles_tells_what_is_right() -> None:
    scores = [
        score("a", variant, policy, 0, 0.25)
        for policy in ("full", "shift")
        for variant in ("own role", "turned role")
    ]
    lines = markdown(report(scores)).splitlines()
    assert "| `shift` | 0.0 % | 100.0 % (100-100) | 0.5000 | 50.0 % | +0.50 |" in lines
    assert lines.index("| `full` | 100.0 % | 100.0 % (100-100) | 0.5000 | 50.0 % | +0.50 |") > 0
    assert "The full prefill takes choice 1 in 100.0 % of them." in lines[-1]
    assert "1 of 3 trials relayed text" in lines[0]


def test_the_table_of_judges_has_nothing_right() -> None:
    scores = [score("a", "12", policy, 1, 0.25) for policy in ("full", "shift")]
    text = markdown(report(scores))
    assert "| `shift` | 0.0 % | 0.0 % (0-0) | 0.5000 |" in text.splitlines()
    assert "right" not in text
    assert summarise_choices(scores)[0].turn is None
