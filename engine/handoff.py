"""Hand-offs between agents: who writes, and who reads what was written in another role.

A file of hand-offs is JSON Lines, one object a line:

    {"id": "...", "domain": "...", "producers": [{"system": "...", "user": "..."}],
     "consumer": {"system": "...", "user_template": "... {output_1} ..."}, "answer": "..."}

`domain` may be missing. A producer may have an `output`, which it writes instead of what the model
would. A `system` may be empty: then there is no system message. The template
holds `{output_1}`, `{output_2}` and so on once each, one for every producer. `answer`, if there is
one, is what the consumer is asked for and can know from the producers alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar

SHIPPED = Path(__file__).parent / "profiles"  # hand-offs among them
_PLACEHOLDER = re.compile(r"\{output_(\d+)\}")
# A number on its own, with or without commas between thousands: no part of a word, a list, a longer
# number or a version. A sign counts unless it stands between two terms.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w|\.\d|,\d{3}(?!\d))"
)
_CODE = re.compile(r"0\d")  # how numbers begin that are names: their zeros count


class _Entry(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Entry)


class HandoffError(ValueError):
    """A file of hand-offs that cannot be used; the message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class Producer:
    """An agent whose answer is handed on."""

    system: str
    user: str
    output: str | None = None  # that it writes, whatever the model would


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
    """Whether a text contains an answer: as whole words, whatever its case and spaces.

    A number is contained where one of the same value stands: 1000 in "$1,000.00", not in "1000.5".
    One that begins with a needless zero is a name, and is contained as it is.
    """
    wanted = _NUMBER.fullmatch(answer.strip().lstrip("$"))
    if wanted and not _CODE.match(wanted[0]):
        return _value(wanted[0]) in {_value(found) for found in _NUMBER.findall(text)}
    words = (re.escape(word) for word in answer.split())
    pattern = r"(?<!\w)" + r"\s+".join(words) + r"(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def shipped_handoffs() -> list[Handoff]:
    """The hand-offs that come with the package, all without an answer."""
    return read_handoffs(SHIPPED / "handoffs.jsonl")


def shipped_questions() -> list[Handoff]:
    """Further ones that come with the package; each has an answer."""
    return read_handoffs(SHIPPED / "questions.jsonl")


def read_handoffs(path: Path) -> list[Handoff]:
    """Reads and checks a file of hand-offs; empty lines are skipped.

    Raises:
        HandoffError: the file cannot be read, has no hand-offs, or a line is not one.
    """
    return read_lines(path, parse_handoff)


def read_lines(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """Reads JSON Lines whose entries have an id; empty lines are skipped.

    Args:
        parse: makes an entry of a line's value, or raises ValueError.

    Raises:
        HandoffError: the file cannot be read, is empty, or a line is refused.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HandoffError(f"cannot read {path}: {error}") from error
    entries: list[T] = []
    lines_of_ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise HandoffError(f"{path}, line {number}: {error}") from error
        first = lines_of_ids.setdefault(entry.id, number)
        if first != number:
            raise HandoffError(
                f"{path}, line {number}: the id '{entry.id}' stands in line {first} already"
            )
        entries.append(entry)
    if not entries:
        raise HandoffError(f"{path} holds no hand-offs")
    return entries


def json_object(
    entry: Any, where: str, names: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    """An object with exactly these fields.

    Raises:
        ValueError: it is none; the message says where and why.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: an object is expected")
    missing = [name for name in names if name not in entry]
    unknown = [name for name in entry if name not in (*names, *optional)]
    if missing:
        raise ValueError(f"{where}: the field '{missing[0]}' is missing")
    if unknown:
        raise ValueError(f"{where}: the field '{unknown[0]}' is unknown")
    return entry


def json_text(value: Any, where: str, may_be_empty: bool = False) -> str:
    """A text.

    Raises:
        ValueError: it is none; the message says where and why.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where}: text is expected")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{where}: the text is empty")
    return value


def parse_handoff(entry: Any) -> Handoff:
    """A hand-off of the value of a line.

    Raises:
        ValueError: it is none.
    """
    where = "the line"
    fields = json_object(entry, where, ("id", "producers", "consumer"), ("domain", "answer"))
    producers = fields["producers"]
    if not isinstance(producers, list) or not producers:
        raise ValueError("producers: a list of at least one is expected")
    consumer = _consumer(fields["consumer"], len(producers))
    answer = None if fields.get("answer") is None else json_text(fields["answer"], "answer")
    if answer and holds_answer(f"{consumer.system}\n{consumer.user_template}", answer):
        raise ValueError("answer: it stands in the consumer's own prompt")
    return Handoff(
        id=json_text(fields["id"], "id"),
        domain=json_text(fields.get("domain", ""), "domain", may_be_empty=True),
        producers=tuple(
            _producer(producer, f"producer {index}")
            for index, producer in enumerate(producers, start=1)
        ),
        consumer=consumer,
        answer=answer,
    )


def _producer(entry: Any, where: str) -> Producer:
    fields = json_object(entry, where, ("system", "user"), ("output",))
    output = fields.get("output")
    return Producer(
        system=json_text(fields["system"], f"{where}: system", may_be_empty=True),
        user=json_text(fields["user"], f"{where}: user"),
        output=None if output is None else json_text(output, f"{where}: output"),
    )


def _consumer(entry: Any, num_outputs: int) -> Consumer:
    fields = json_object(entry, "consumer", ("system", "user_template"))
    template = json_text(fields["user_template"], "consumer: user_template")
    found = sorted(int(number) for number in _PLACEHOLDER.findall(template))
    if found != list(range(1, num_outputs + 1)):
        expected = ", ".join(f"{{output_{i}}}" for i in range(1, num_outputs + 1))
        raise ValueError(f"consumer: user_template: {expected} must stand in it, each once")
    return Consumer(json_text(fields["system"], "consumer: system", may_be_empty=True), template)
