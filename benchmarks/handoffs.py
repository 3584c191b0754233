"""Agent hand-offs on which fidelity is measured: who writes, and who reads it in another role."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"\{output_(\d+)\}")
_MIN_WORDS_AROUND = 20  # instructions before the first and behind the last output


@dataclass(frozen=True, slots=True)
class Producer:
    """An agent whose answer is handed on."""

    system: str
    user: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """The agent that reads the answers; `user_template` holds `{output_1}` and so on."""

    system: str
    user_template: str

    def user(self, outputs: Sequence[str]) -> str:
        """The user message with the producers' answers in their places.

        Braces in the answers mean nothing.
        """
        return _PLACEHOLDER.sub(lambda match: outputs[int(match[1]) - 1], self.user_template)


@dataclass(frozen=True, slots=True)
class Handoff:
    """One or two producers, in the order in which they write, and their consumer."""

    id: str
    producers: tuple[Producer, ...]
    consumer: Consumer


def load_handoffs(path: Path) -> list[Handoff]:
    """Reads and checks a file of hand-offs.

    Raises:
        ValueError: the file is no list of well-formed hand-offs; the message names the entry.
        OSError: the file cannot be read.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path.name}: a list is expected")
    handoffs = [_handoff(entry, number) for number, entry in enumerate(entries, start=1)]
    ids = [handoff.id for handoff in handoffs]
    for handoff_id in ids:
        if ids.count(handoff_id) > 1:
            raise ValueError(f"hand-off {handoff_id!r}: the id occurs twice")
    return handoffs


def _handoff(entry: Any, number: int) -> Handoff:
    where = f"hand-off {number}"
    fields = _fields(entry, ("id", "producers", "consumer"), where)
    handoff_id = _text(fields["id"], f"{where}: id")
    where = f"hand-off {handoff_id!r}"
    producers = fields["producers"]
    if not isinstance(producers, list) or len(producers) not in (1, 2):
        raise ValueError(f"{where}: one or two producers are expected")
    handoff = Handoff(
        id=handoff_id,
        producers=tuple(
            _producer(producer, f"{where}: producer {index}")
            for index, producer in enumerate(producers, start=1)
        ),
        consumer=_consumer(fields["consumer"], len(producers), f"{where}: consumer"),
    )
    roles = [handoff.consumer.system, *(producer.system for producer in handoff.producers)]
    if len(set(roles)) != len(roles):
        raise ValueError(f"{where}: every agent needs a role prompt of its own")
    return handoff


def _producer(entry: Any, where: str) -> Producer:
    fields = _fields(entry, ("system", "user"), where)
    return Producer(
        system=_text(fields["system"], f"{where}: system", 40, 150),
        user=_text(fields["user"], f"{where}: user", 40, 200),
    )


def _consumer(entry: Any, num_outputs: int, where: str) -> Consumer:
    fields = _fields(entry, ("system", "user_template"), where)
    template = _text(fields["user_template"], f"{where}: user_template")
    found = list(_PLACEHOLDER.finditer(template))
    if sorted(int(match[1]) for match in found) != list(range(1, num_outputs + 1)):
        raise ValueError(f"{where}: each of {num_outputs} outputs must be embedded once")
    around = (template[: found[0].start()], template[found[-1].end() :])
    if min(len(text.split()) for text in around) < _MIN_WORDS_AROUND:
        raise ValueError(
            f"{where}: {_MIN_WORDS_AROUND} words must stand before and behind the outputs"
        )
    return Consumer(
        system=_text(fields["system"], f"{where}: system", 60, 200), user_template=template
    )


def _fields(entry: Any, names: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"{where}: exactly the fields {', '.join(names)} are expected")
    return entry


def _text(value: Any, where: str, min_words: int = 1, max_words: int | None = None) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: text is expected")
    num_words = len(value.split())
    if num_words < min_words or (max_words is not None and num_words > max_words):
        limit = f"{min_words} to {max_words}" if max_words is not None else f"at least {min_words}"
        raise ValueError(f"{where}: {num_words} words, but {limit} are expected")
    return value
