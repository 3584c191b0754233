"""Trials in which a consumer has to choose, once after another of several readings of one text.

A file of trials is JSON Lines. A line is a hand-off (`engine/handoff.py`) with further fields:

    {..., "choices": ["A", "B", "C", "D"]}                    a judge of as many producers
    {..., "choices": ["Yes", "No"], "turned": "..."}          a role that is turned round

A judge chooses among candidates, which are the producers' texts; they are read in several orders,
in each of which every candidate stands at another place. A turned role takes the place of the
consumer's own: what was right before, the first choice, is then wrong, and the second is right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaykv.engine.handoff import SHIPPED, Handoff, json_text, parse_handoff, read_lines


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of reading what the producers wrote."""

    name: str
    system: str  # of the consumer
    order: tuple[int, ...]  # of the producers' texts
    right: int | None = None  # index of the right choice; None: there is none

    @property
    def is_turned(self) -> bool:
        return self.right == 1


@dataclass(frozen=True, slots=True)
class ChoiceTrial:
    """A hand-off whose consumer answers with one of several words."""

    handoff: Handoff
    choices: tuple[str, ...]
    turned: str | None = None  # another role prompt of the consumer

    @property
    def id(self) -> str:
        return self.handoff.id

    def variants(self) -> tuple[Variant, ...]:
        """How the texts are read; the same every time."""
        system, order = self.handoff.consumer.system, tuple(range(len(self.handoff.producers)))
        if self.turned is not None:
            plain = Variant("own role", system, order, right=0)
            return (plain, Variant("turned role", self.turned, order, right=1))
        shuffled = random.Random(self.id).sample(order, len(order))
        orders = [(*shuffled[first:], *shuffled[:first]) for first in order]
        return tuple(Variant("".join(str(i + 1) for i in o), system, o) for o in orders)


def shipped_judges() -> list[ChoiceTrial]:
    """The trials with judges that come with the package."""
    return read_judges(SHIPPED / "judges.jsonl")


def shipped_flips() -> list[ChoiceTrial]:
    """The trials with turned roles that come with the package."""
    return read_flips(SHIPPED / "flips.jsonl")


def read_judges(path: Path) -> list[ChoiceTrial]:
    """Reads and checks a file of trials with judges.

    Raises:
        HandoffError: the file cannot be read, has no trials, or a line is not one.
    """
    return read_lines(path, _judge)


def read_flips(path: Path) -> list[ChoiceTrial]:
    """Reads and checks a file of trials with turned roles.

    Raises:
        HandoffError: the file cannot be read, has no trials, or a line is not one.
    """
    return read_lines(path, _flip)


def _judge(entry: Any) -> ChoiceTrial:
    choices, handoff = _parts(entry, "choices")
    if len(choices) != len(handoff.producers):
        raise ValueError("choices: there must be one for every producer")
    return ChoiceTrial(handoff, choices)


def _flip(entry: Any) -> ChoiceTrial:
    choices, handoff = _parts(entry, "choices", "turned")
    if len(choices) != 2:
        raise ValueError("choices: two are expected, the right one first")
    return ChoiceTrial(handoff, choices, json_text(entry["turned"], "turned"))


def _parts(entry: Any, *names: str) -> tuple[tuple[str, ...], Handoff]:
    """The choices of a trial, and its hand-off, which knows nothing of the further fields."""
    if not isinstance(entry, dict):
        raise ValueError("the line: an object is expected")
    for name in names:
        if name not in entry:
            raise ValueError(f"the line: the field '{name}' is missing")
    choices = entry["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("choices: a list of at least two is expected")
    words = tuple(json_text(choice, "choices") for choice in choices)
    if len(set(words)) < len(words):
        raise ValueError("choices: they must differ")
    return words, parse_handoff({k: v for k, v in entry.items() if k not in names})
