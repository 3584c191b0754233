"""Hand-offs between agents: who writes, and who reads what was written in another role.

A file of hand-offs is JSON Lines, one object a line:

    {"id": "...", "domain": "...", "producers": [{"system": "...", "user": "..."}],
     "consumer": {"system": "...", "user_template": "... {output_1} ..."}, "answer": "..."}

`domain` may be missing. A `system` may be empty: then there is no system message. The template
holds `{output_1}`, `{output_2}` and so on once each, one for every producer. `answer`, if there is
one, is what the consumer is asked for and can know from the producers alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "profiles"
_PLACEHOLDER = re.compile(r"\{output_(\d+)\}")


class HandoffError(ValueError):
    """A file of hand-offs that cannot be used; the message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class Producer:
    """An agent whose answer is handed on."""

    system: str
    user: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """The agent that reads the answers."""

    system: str
    user_template: str

    def user(self, outputs: Sequence[str]) -> str:
        """The user message with the producers' answers in their places.

        Braces in the answers mean nothing.
        """
        return _PLACEHOLDER.sub(lambda match: outputs[int(match[1]) - 1], self.user_template)


@dataclass(frozen=True, slots=True)
class Handoff:
    """Producers, who do not know of each other, and their consumer."""

    id: str
    domain: str
    producers: tuple[Producer, ...]
    consumer: Consumer
    answer: str | None = None  # stands in what a producer was asked, not in the consumer's prompt


def holds_answer(text: str, answer: str) -> bool:
    """Whether a text contains an answer: as whole words, whatever its case and spaces."""
    words = (re.escape(word) for word in answer.split())
    pattern = r"(?<!\w)" + r"\s+".join(words) + r"(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def shipped_handoffs() -> list[Handoff]:
    """The hand-offs that come with the package, all without an answer."""
    return read_handoffs(_FOLDER / "handoffs.jsonl")


def shipped_questions() -> list[Handoff]:
    """Further ones that come with the package; each has an answer."""
    return read_handoffs(_FOLDER / "questions.jsonl")


def read_handoffs(path: Path) -> list[Handoff]:
    """Reads and checks a file of hand-offs; empty lines are skipped.

    Raises:
        HandoffError: the file cannot be read, has no hand-offs, or a line is not one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HandoffError(f"cannot read {path}: {error}") from error
    handoffs: list[Handoff] = []
    lines_of_ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            handoff = _handoff(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise HandoffError(f"{path}, line {number}: {error}") from error
        first = lines_of_ids.setdefault(handoff.id, number)
        if first != number:
            raise HandoffError(
                f"{path}, line {number}: the id '{handoff.id}' stands in line {first} already"
            )
        handoffs.append(handoff)
    if not handoffs:
        raise HandoffError(f"{path} holds no hand-offs")
    return handoffs


def _handoff(entry: Any) -> Handoff:
    where = "the line"
    fields = _object(entry, where, ("id", "producers", "consumer"), ("domain", "answer"))
    producers = fields["producers"]
    if not isinstance(producers, list) or not producers:
        raise ValueError("producers: a list of at least one is expected")
    consumer = _consumer(fields["consumer"], len(producers))
    answer = None if fields.get("answer") is None else _text(fields["answer"], "answer")
    if answer and holds_answer(f"{consumer.system}\n{consumer.user_template}", answer):
        raise ValueError("answer: it stands in the consumer's own prompt")
    return Handoff(
        id=_text(fields["id"], "id"),
        domain=_text(fields.get("domain", ""), "domain", may_be_empty=True),
        producers=tuple(
            _producer(producer, f"producer {index}")
            for index, producer in enumerate(producers, start=1)
        ),
        consumer=consumer,
        answer=answer,
    )


def _producer(entry: Any, where: str) -> Producer:
    fields = _object(entry, where, ("system", "user"))
    return Producer(
        system=_text(fields["system"], f"{where}: system", may_be_empty=True),
        user=_text(fields["user"], f"{where}: user"),
    )


def _consumer(entry: Any, num_outputs: int) -> Consumer:
    fields = _object(entry, "consumer", ("system", "user_template"))
    template = _text(fields["user_template"], "consumer: user_template")
    found = sorted(int(number) for number in _PLACEHOLDER.findall(template))
    if found != list(range(1, num_outputs + 1)):
        expected = ", ".join(f"{{output_{i}}}" for i in range(1, num_outputs + 1))
        raise ValueError(f"consumer: user_template: {expected} must stand in it, each once")
    return Consumer(_text(fields["system"], "consumer: system", may_be_empty=True), template)


def _object(
    entry: Any, where: str, names: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: an object is expected")
    missing = [name for name in names if name not in entry]
    unknown = [name for name in entry if name not in (*names, *optional)]
    if missing:
        raise ValueError(f"{where}: the field '{missing[0]}' is missing")
    if unknown:
        raise ValueError(f"{where}: the field '{unknown[0]}' is unknown")
    return entry


def _text(value: Any, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: text is expected")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{where}: the text is empty")
    return value
