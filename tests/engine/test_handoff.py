from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relaykv.engine.handoff import (
    HandoffError,
    holds_answer,
    read_handoffs,
    shipped_handoffs,
    shipped_questions,
)

GOOD: dict[str, Any] = {
    "id": "a",
    "domain": "tests",
    "producers": [{"system": "You write.", "user": "Write."}],
    "consumer": {"system": "", "user_template": "Read {output_1} now."},
}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "handoffs.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def changed(**fields: Any) -> str:
    return json.dumps({**GOOD, **fields})


def consumer(template: str) -> dict[str, str]:
    return {"system": "You read.", "user_template": template}


def test_the_shipped_handoffs_cover_many_domains_and_both_numbers_of_producers() -> None:
    handoffs = shipped_handoffs()

    assert len(handoffs) >= 24
    assert len({handoff.domain for handoff in handoffs}) >= 12
    assert {len(handoff.producers) for handoff in handoffs} == {1, 2}
    for handoff in handoffs:
        roles = [handoff.consumer.system, *(producer.system for producer in handoff.producers)]
        assert all(roles)
        assert len(set(roles)) == len(roles)


def test_the_shipped_handoffs_put_text_before_and_behind_every_output() -> None:
    for handoff in shipped_handoffs():
        marks = [f"<{index}>" for index, _ in enumerate(handoff.producers)]
        text = handoff.consumer.user(marks)
        assert len(text[: text.index(marks[0])].split()) >= 10, handoff.id
        assert len(text[text.index(marks[-1]) :].split()) >= 20, handoff.id


def test_every_shipped_question_has_an_answer_that_its_producer_alone_is_told() -> None:
    questions = shipped_questions()

    assert len(questions) >= 12
    assert not {question.id for question in questions} & {each.id for each in shipped_handoffs()}
    for question in questions:
        assert question.answer is not None
        assert holds_answer(question.producers[0].user, question.answer)
        assert not holds_answer(question.consumer.user(["..."]), question.answer)


def test_an_answer_is_optional_and_must_not_stand_in_the_consumers_prompt(tmp_path: Path) -> None:
    first, second = read_handoffs(
        write(tmp_path, changed(answer="berth 11"), changed(id="b", answer=None))
    )
    assert (first.answer, second.answer) == ("berth 11", None)
    in_template = consumer("Read {output_1} at Berth 11.")
    in_role = {**consumer("Read {output_1}."), "system": "Use berth  11."}
    for told in (in_template, in_role):
        with pytest.raises(HandoffError, match="answer: it stands in the consumer's own prompt"):
            read_handoffs(write(tmp_path, changed(answer="berth 11", consumer=told)))


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("It is berth 11.", "berth 11", True),
        ("It is BERTH\n11, not 4.", "berth 11", True),
        ("It is berth 115.", "berth 11", False),
        ("The nitrate is 3.7 milligrams", "3.7", True),
        ("The nitrate is 13.7 milligrams", "3.7", False),
        ("The nitrate is 3x7 milligrams", "3.7", False),
        ("heron-3 failed", "heron-3", True),
        ("50 %", "50 %", True),
        ("", "x", False),
    ],
)
def test_an_answer_is_held_as_whole_words_whatever_their_case_and_spaces(
    text: str, answer: str, held: bool
) -> None:
    assert holds_answer(text, answer) is held


def test_lines_are_read_in_order_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    second = json.loads(changed(id="b"))
    del second["domain"]
    path = write(tmp_path, changed(), "", json.dumps(second), "  ")

    first, last = read_handoffs(path)

    assert (first.id, first.domain, first.producers[0].user) == ("a", "tests", "Write.")
    assert (last.id, last.domain, last.consumer.system) == ("b", "", "")


def test_outputs_take_their_places_and_their_braces_mean_nothing(tmp_path: Path) -> None:
    producers = GOOD["producers"] * 2
    line = changed(producers=producers, consumer=consumer("B {output_2}, A {output_1}."))

    (handoff,) = read_handoffs(write(tmp_path, line))

    assert handoff.consumer.user(["{output_2}", "\\1"]) == "B \\1, A {output_2}."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "an object is expected"),
        (changed(extra=1), "the field 'extra' is unknown"),
        (json.dumps({"id": "a"}), "the field 'producers' is missing"),
        (changed(id=3), "id: text is expected"),
        (changed(id=" "), "id: the text is empty"),
        (changed(producers=[]), "producers: a list of at least one is expected"),
        (changed(producers=[{"system": ""}]), "producer 1: the field 'user' is missing"),
        (changed(producers=[{"system": "", "user": ""}]), "producer 1: user: the text is empty"),
        (changed(consumer=consumer("no place")), r"\{output_1\} must stand in it, each once"),
        (changed(consumer=consumer("{output_1}{output_1}")), "each once"),
        (changed(consumer=consumer("{output_1} {output_2}")), "each once"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_line_that_is_no_handoff_is_refused_with_its_number_and_the_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = write(tmp_path, changed(id="first"), line)

    with pytest.raises(HandoffError, match=reason) as caught:
        read_handoffs(path)

    assert f"{path}, line 2: " in str(caught.value)


def test_an_id_that_occurs_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(HandoffError, match="line 3: the id 'a' stands in line 1 already"):
        read_handoffs(write(tmp_path, changed(), changed(id="b"), changed()))


def test_a_file_that_is_missing_or_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HandoffError, match="cannot read"):
        read_handoffs(tmp_path / "none.jsonl")
    with pytest.raises(HandoffError, match="holds no hand-offs"):
        read_handoffs(write(tmp_path, "", ""))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HandoffError, match="cannot read"):
        read_handoffs(path)


@pytest.mark.parametrize(
    ("text", "answer", "holds"),
    [
        ("It is 1,000.", "1000", True),
        ("$1000 in all", "$1,000", True),
        ("18.0 pens", "18", True),
        ("7*3=21", "21", True),
        ("it costs 72.50", "72", False),
        ("1.25 metres", "25", False),
        ("minus -5 degrees", "5", False),
        ("minus -5 degrees", "-5", True),
        ("9-5", "5", True),
        ("model v25", "25", False),
        ("10", "100", False),
        ("They need 1,600 bricks.", "600", False),
        ("1,234,567", "1,234", False),
        ("2,3 and 4", "3", True),
        ("12,3456 is no number", "12", True),
        ("version 1.2.3", "1.2", False),
        ("the 18th", "18", False),
        ("room 7", "007", False),
        ("room 007", "007", True),
        ("", "0", False),
    ],
)
def test_a_number_is_held_where_one_of_its_value_stands(
    text: str, answer: str, holds: bool
) -> None:
    assert holds_answer(text, answer) is holds
