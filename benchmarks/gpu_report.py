"""What the GPU check's sections are given and what becomes of their results."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

SCHEMA = 1
# In front of every line of a dry run, so that no part of its output can be taken for a result.
DRY_PREFIX = "dry run on a CPU, nothing ran on a GPU | "


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Budget:
    """Seconds that a section may use, from its making on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def each(self, items: Iterable[tuple[str, Any]], left_out: list[str]) -> Iterator[Any]:
        """Yields the items while time is left; the names of the others go to `left_out`."""
        for name, item in items:
            if self.left_s > 0:
                yield item
            else:
                left_out.append(name)


@dataclass(slots=True)
class SectionResult:
    """One section as it stands in the JSON file; written whenever something was recorded."""

    name: str
    path: Path
    status: str = "running"  # then "done", "failed" or, when it never began, "left out"
    seconds: float = 0.0
    error: str | None = None
    problems: list[str] = field(default_factory=list)  # what is wrong although nothing raised
    left_out: list[str] = field(default_factory=list)  # for want of time
    data: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        values = {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "error": self.error,
            "problems": self.problems,
            "left_out": self.left_out,
            "data": self.data,
        }
        write_json(self.path, values)


class Recorder:
    """A section's way to print lines, to keep values and to say that something is wrong."""

    def __init__(self, result: SectionResult, budget: Budget, say: Callable[[str], None]) -> None:
        self.budget = budget
        self.say = say
        self._result = result

    def record(self, key: str, value: Any) -> None:
        self._result.data[key] = value
        self._result.save()

    def append(self, key: str, value: Mapping[str, Any]) -> None:
        self._result.data.setdefault(key, []).append(value)
        self._result.save()

    def problem(self, text: str) -> None:
        """The section goes on and fails at its end."""
        self.say(f"PROBLEM: {text}")
        self._result.problems.append(text)
        self._result.save()

    def each(self, items: Iterable[tuple[str, Any]]) -> Iterator[Any]:
        return self.budget.each(items, self._result.left_out)


def run_guarded(
    result: SectionResult,
    budget: Budget,
    say: Callable[[str], None],
    section: Callable[[Recorder], None],
) -> None:
    """Runs a section; whatever it raises becomes its result."""
    started = time.monotonic()
    result.save()
    try:
        section(Recorder(result, budget, say))
    except Exception as error:
        result.error = "".join(traceback.format_exception(error))
        say(f"FAILED: {type(error).__name__}: {error}")
    result.status = "failed" if result.error or result.problems else "done"
    result.seconds = time.monotonic() - started
    for name in result.left_out:
        say(f"left out for want of time: {name}")
    result.save()


def printer(dry: bool) -> Callable[[str], None]:
    """Prints text line by line, marked when it is a dry run."""

    def say(text: str) -> None:
        for line in text.split("\n"):
            print(f"{DRY_PREFIX}{line}" if dry else line, flush=True)

    return say


def write_json(path: Path, values: Any) -> None:
    """Replaces the file as a whole: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns of equal width, the first left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return "\n".join(lines)
