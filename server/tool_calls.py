"""Finds tool calls in the text of an answer as it arrives.

What is found depends on the whole text alone, not on the pieces it arrives in: a streamed answer
and a plain one are read by the same parser. A call is told when it is complete, so that one
that was cut off is no call in either.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from relaykv.server.tool_form import CLOSE_TAG, OPEN_TAG, ToolForm
from relaykv.server.tools import ToolUse


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    name: str
    arguments: str  # JSON of an object


Piece = str | ToolCall  # of an answer, in order; texts are not empty


class AnswerParser(Protocol):
    """Splits one answer into text and calls."""

    def push(self, text: str) -> list[Piece]:
        """Takes the next text and tells what is certain by now."""
        ...

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """Tells the rest. `is_cut`: the limit on tokens ended the answer, not the model."""
        ...


def answer_parser(tools: ToolUse | None, form: ToolForm) -> AnswerParser:
    """The parser of one answer."""
    if tools is None:
        return PlainText()
    return TaggedCalls(tools) if form.is_tagged else BareCall(tools)


class PlainText:
    """An answer that calls nothing."""

    def push(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self, *, is_cut: bool) -> list[Piece]:  # noqa: ARG002
        return []


class TaggedCalls:
    """Calls between `<tool_call>` and `</tool_call>`, with text around them.

    White space beside a call belongs to neither text nor call. What stands between tags and is
    no call remains text, but for a call that was cut off: it is left out.
    """

    def __init__(self, tools: ToolUse) -> None:
        self._names = {function.name for function in tools.callable}
        self._is_forced = tools.is_forced
        self._calls_left = tools.max_calls
        self._held = ""  # text that may become part of a call, or the body of one so far
        self._end: _JsonEnd | None = None  # while inside of a call
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._read_call(pieces) if self._end else self._read_text(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._end is None:
            is_part_of_tag = is_cut and self._is_forced
            rest = "" if self._after_call and not self._held.strip() else self._held
            return [rest] if rest and not is_part_of_tag else []
        if not is_cut and not self._call(self._held[: self._end.find(self._held)], pieces):
            pieces.append(OPEN_TAG + self._held)
        return pieces

    def _read_text(self, pieces: list[Piece]) -> bool:
        """Reads up to the next call. True when there is one in what has arrived."""
        if self._after_call:
            self._held = self._held.lstrip()
        start = self._held.find(OPEN_TAG)
        stop = _num_certain(self._held) if start < 0 else len(self._held[:start].rstrip())
        if stop > 0:
            pieces.append(self._held[:stop])
            self._after_call = False
        if start < 0:
            self._held = self._held[stop:]
            return False
        self._held = self._held[start + len(OPEN_TAG) :]
        self._end = _JsonEnd()
        return True

    def _read_call(self, pieces: list[Piece]) -> bool:
        """Reads to the end of the call. True when that has arrived."""
        assert self._end is not None
        body_stop = self._end.find(self._held)
        if body_stop is None:
            return False
        stop = _tag_stop(self._held, body_stop) if body_stop > 0 else self._text_stop()
        if stop is None:
            return False
        if not self._call(self._held[:body_stop] if body_stop else "", pieces):
            pieces.append(OPEN_TAG + self._held[:stop])
            self._after_call = False
        self._held = self._held[stop:]
        self._end = None
        return True

    def _text_stop(self) -> int | None:
        at = self._held.find(CLOSE_TAG)
        return None if at < 0 else at + len(CLOSE_TAG)

    def _call(self, body: str, pieces: list[Piece]) -> bool:
        calls = _parse_calls(body, self._names)
        pieces += calls[: self._calls_left]
        self._calls_left -= min(len(calls), self._calls_left)
        self._after_call = self._after_call or bool(calls)
        return bool(calls)


class BareCall:
    """An answer that is one call and nothing else from its first character on, or else text."""

    def __init__(self, tools: ToolUse) -> None:
        self._names = {function.name for function in tools.callable}
        self._is_forced = tools.is_forced
        self._held = ""
        self._end = _JsonEnd()
        self._is_call: bool | None = None  # None: not known yet

    def push(self, text: str) -> list[Piece]:
        if self._is_call is None:
            self._held += text
            stop = self._end.find(self._held)
            if stop is None:
                return []
            calls = _parse_calls(self._held[:stop], self._names)
            self._is_call = bool(calls)
            text, self._held = self._held, ""
            if calls:
                return [calls[0]]
        return [text] if text and not self._is_call else []

    def finish(self, *, is_cut: bool) -> list[Piece]:
        return [self._held] if self._held and not (is_cut and self._is_forced) else []


class _JsonEnd:
    """Finds the end of the JSON object or array that a growing text begins with."""

    def __init__(self) -> None:
        self._position = 0  # up to which the text has been read
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Index behind the value; 0 when the text begins with something else; None: not yet."""
        for position in range(self._position, len(text)):
            char = text[position]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0:
                if not char.isspace():
                    self._position = position
                    return 0
            elif char == '"':
                self._in_string = True
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._position = position
                    self._depth = 1  # so that the same place is found again
                    return position + 1
        self._position = len(text)
        return None


def _num_certain(text: str) -> int:
    """Characters at the start of a text that no later tag can make part of a call."""
    kept = text
    for length in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1):
        if text.endswith(OPEN_TAG[:length]):
            kept = text[:-length]
            break
    return len(kept.rstrip())


def _tag_stop(text: str, start: int) -> int | None:
    """Where the closing tag ends that should follow; the JSON's own end when there is none."""
    rest = text[start:].lstrip()
    if rest.startswith(CLOSE_TAG):
        return len(text) - len(rest) + len(CLOSE_TAG)
    return None if CLOSE_TAG.startswith(rest) else start


def _parse_calls(body: str, names: Collection[str]) -> list[ToolCall]:
    """The calls of a JSON text, one object or an array of them; none when it is anything else."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        entries = value if isinstance(value, list) else [value]
        calls = [_parse_call(entry, names) for entry in entries]
    except (ValueError, RecursionError):
        return []
    return [call for call in calls if call is not None] if None not in calls else []


def _parse_call(entry: Any, names: Collection[str]) -> ToolCall | None:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_refuse_constant)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, _json_text(arguments))


def _json_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no other form
        return json.dumps(arguments, allow_nan=False)
    return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
