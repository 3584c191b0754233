"""The hand-offs on which results were measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from relaykv.engine.handoff import read_handoffs

_HANDOFFS = Path(__file__).parents[2] / "benchmarks" / "handoffs.jsonl"
_MIN_WORDS_AROUND = 20


def test_there_are_eight_handoffs_with_one_producer_and_six_with_two() -> None:
    handoffs = read_handoffs(_HANDOFFS)
    assert Counter(len(handoff.producers) for handoff in handoffs) == {1: 8, 2: 6}
    roles = [producer.system for handoff in handoffs for producer in handoff.producers]
    roles += [handoff.consumer.system for handoff in handoffs]
    assert len(set(roles)) == len(roles)


def test_some_consumer_reads_the_outputs_in_another_order_than_they_were_written() -> None:
    order = [
        handoff.consumer.user(["<1>", "<2>"])
        for handoff in read_handoffs(_HANDOFFS)
        if len(handoff.producers) == 2
    ]
    swapped = [text for text in order if text.index("<2>") < text.index("<1>")]
    assert 0 < len(swapped) < len(order)


def test_instructions_stand_before_and_behind_the_outputs() -> None:
    for handoff in read_handoffs(_HANDOFFS):
        marks = [f"<{index}>" for index, _ in enumerate(handoff.producers)]
        text = handoff.consumer.user(marks)
        places = sorted(text.index(mark) for mark in marks)
        around = (text[: places[0]], text[places[-1] :])
        assert min(len(part.split()) for part in around) >= _MIN_WORDS_AROUND, handoff.id
