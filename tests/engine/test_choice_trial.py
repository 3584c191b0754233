"""Trials of choices: their file formats, and those that are shipped."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaykv.engine.choice_trial import (
    ChoiceTrial,
    read_flips,
    read_judges,
    shipped_flips,
    shipped_judges,
)
from relaykv.engine.handoff import HandoffError


def flip(**fields: Any) -> str:
    entry = {
        "id": "a",
        "producers": [{"system": "You write.", "user": "Write."}],
        "consumer": {"system": "Yes is right.", "user_template": "Read {output_1} now."},
        "choices": ["Yes", "No"],
        "turned": "No is right.",
    }
    return json.dumps({**entry, **fields})


def judge(**fields: Any) -> str:
    entry = {
        "id": "a",
        "producers": [{"system": f"You write {i}.", "user": "Write."} for i in range(3)],
        "consumer": {"system": "", "user_template": "A {output_1} B {output_2} C {output_3}"},
        "choices": ["A", "B", "C"],
    }
    return json.dumps({**entry, **fields})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trials.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_shipped_judges_choose_among_four_by_letters() -> None:
    trials = shipped_judges()
    assert len(trials) >= 8
    for trial in trials:
        assert trial.choices == ("A", "B", "C", "D")
        template = trial.handoff.consumer.user_template
        for number, letter in enumerate(trial.choices, start=1):
            assert f"Answer {letter}:\n{{output_{number}}}" in template


def test_the_shipped_roles_differ_only_in_what_they_accept() -> None:
    trials = shipped_flips()
    assert len(trials) >= 12
    for trial in trials:
        assert trial.choices == ("Yes", "No")
        assert trial.turned is not None
        own, turned = (
            re.findall(r"\w+", text) for text in (trial.handoff.consumer.system, trial.turned)
        )
        assert own != turned
        assert Counter(own) == Counter(turned)  # accepted and refused change places


def test_a_judge_reads_every_candidate_at_every_place_once(tmp_path: Path) -> None:
    (trial,) = read_judges(write(tmp_path, judge()))

    variants = trial.variants()

    assert variants == trial.variants()
    assert len(variants) == 3
    for place in range(3):
        assert {variant.order[place] for variant in variants} == {0, 1, 2}
    assert {(variant.system, variant.right, variant.is_turned) for variant in variants} == {
        ("", None, False)
    }
    assert variants[0].name == "".join(str(index + 1) for index in variants[0].order)


def test_a_turned_role_makes_the_other_choice_right(tmp_path: Path) -> None:
    (trial,) = read_flips(write(tmp_path, flip()))

    own, turned = trial.variants()

    assert (own.system, own.right, own.is_turned) == ("Yes is right.", 0, False)
    assert (turned.system, turned.right, turned.is_turned) == ("No is right.", 1, True)


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (read_flips, "[]", "an object is expected"),
        (read_flips, judge(), "the field 'turned' is missing"),
        (read_flips, flip(turned=" "), "turned: the text is empty"),
        (read_flips, flip(choices=["Yes", "No", "?"]), "choices: two are expected"),
        (read_flips, flip(choices=["Yes"]), "choices: a list of at least two"),
        (read_flips, flip(choices=["Yes", "Yes"]), "choices: they must differ"),
        (read_flips, flip(choices=["Yes", 1]), "choices: text is expected"),
        (read_judges, judge(choices=["A", "B"]), "choices: there must be one for every producer"),
        (read_judges, judge(turned="x"), "the field 'turned' is unknown"),
        (read_judges, judge(consumer={}), "consumer: the field 'system' is missing"),
    ],
)
def test_a_line_that_is_no_trial_is_refused_with_its_number(
    read: Callable[[Path], list[ChoiceTrial]], text: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(HandoffError, match=f"line 1: .*{reason}"):
        read(write(tmp_path, text))
