"""The hand-off texts, and what their loader refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handoffs
import pytest

TEXTS = Path(handoffs.__file__).with_name("handoffs.json")


def entry() -> dict[str, Any]:
    words = " word" * 60
    return {
        "id": "one",
        "producers": [{"system": "writer" + words, "user": "task" + words}],
        "consumer": {
            "system": "reader" + words,
            "user_template": f"{words} {{output_1}} {words}",
        },
    }


def load(tmp_path: Path, entries: object) -> list[handoffs.Handoff]:
    path = tmp_path / "handoffs.json"
    path.write_text(json.dumps(entries))
    return handoffs.load_handoffs(path)


def test_there_are_eight_handoffs_with_one_producer_and_six_with_two() -> None:
    loaded = handoffs.load_handoffs(TEXTS)
    assert Counter(len(handoff.producers) for handoff in loaded) == {1: 8, 2: 6}
    roles = [producer.system for handoff in loaded for producer in handoff.producers]
    roles += [handoff.consumer.system for handoff in loaded]
    assert len(set(roles)) == len(roles)


def test_some_consumer_reads_the_outputs_in_another_order_than_they_were_written() -> None:
    order = [
        handoff.consumer.user(["<1>", "<2>"])
        for handoff in handoffs.load_handoffs(TEXTS)
        if len(handoff.producers) == 2
    ]
    swapped = [text for text in order if text.index("<2>") < text.index("<1>")]
    assert 0 < len(swapped) < len(order)


def test_outputs_stand_where_the_template_says_even_with_braces(tmp_path: Path) -> None:
    (handoff,) = load(tmp_path, [entry()])
    text = handoff.consumer.user(["a {output_1} {b}"])
    assert text.count("a {output_1} {b}") == 1
    assert text.strip().startswith("word")
    assert text.strip().endswith("word")


def second_output(handoff: dict[str, Any]) -> None:
    handoff["consumer"]["user_template"] += "{output_2}" + " word" * 20


def repeated_output(handoff: dict[str, Any]) -> None:
    handoff["consumer"]["user_template"] += "{output_1}" + " word" * 20


def bare_output(handoff: dict[str, Any]) -> None:
    handoff["consumer"]["user_template"] = "Read this: {output_1}" + " word" * 20


def same_role(handoff: dict[str, Any]) -> None:
    handoff["producers"][0]["system"] = handoff["consumer"]["system"]


def short_role(handoff: dict[str, Any]) -> None:
    handoff["producers"][0]["system"] = "You write."


def no_producer(handoff: dict[str, Any]) -> None:
    handoff["producers"] = []


def unknown_field(handoff: dict[str, Any]) -> None:
    handoff["title"] = "One"


def number_for_text(handoff: dict[str, Any]) -> None:
    handoff["producers"][0]["user"] = 7


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (second_output, "each of 1 outputs must be embedded once"),
        (repeated_output, "each of 1 outputs must be embedded once"),
        (bare_output, "20 words must stand before and behind"),
        (same_role, "a role prompt of its own"),
        (short_role, "producer 1: system: 2 words, but 40 to 150"),
        (no_producer, "one or two producers"),
        (unknown_field, "exactly the fields id, producers, consumer"),
        (number_for_text, "producer 1: user: text is expected"),
    ],
)
def test_a_malformed_handoff_is_refused_by_name(
    spoil: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    bad = entry()
    spoil(bad)
    with pytest.raises(ValueError, match=message) as failure:
        load(tmp_path, [bad])
    assert "hand-off" in str(failure.value)


def test_ids_are_unique_and_the_file_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'one': the id occurs twice"):
        load(tmp_path, [entry(), entry()])
    with pytest.raises(ValueError, match="a list is expected"):
        load(tmp_path, entry())
