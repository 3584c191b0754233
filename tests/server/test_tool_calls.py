"""Calls in the text of an answer: what is found, whatever pieces the text arrives in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relaykv.server.protocol import FunctionTool
from relaykv.server.tool_calls import Piece, ToolCall, answer_parser
from relaykv.server.tool_form import ToolForm, tool_form_of
from relaykv.server.tools import ToolUse, read_tool_use

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ToolCall("f", '{"a": 1}')


def tool_use(choice: Any = "auto", parallel: bool | None = None) -> ToolUse:
    tools = [
        FunctionTool.model_validate({"type": "function", "function": {"name": name}})
        for name in ("f", "g")
    ]
    use = read_tool_use(tools, choice, parallel)
    assert use is not None
    return use


def parse(
    text: str,
    size: int,
    *,
    tools: ToolUse | None = None,
    form: ToolForm = ToolForm.HERMES,
    is_cut: bool = False,
) -> list[Piece]:
    """Pieces of a text that arrives `size` characters at a time, neighbouring texts joined."""
    parser = answer_parser(tools or tool_use(), form)
    pieces: list[Piece] = []
    found = [
        piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])
    ]
    for piece in [*found, *parser.finish(is_cut=is_cut)]:
        assert piece != ""
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def both(text: str, **options: Any) -> list[Piece]:
    """The pieces, which must be the same in every grouping."""
    whole = parse(text, len(text) or 1, **options)
    for size in range(1, min(len(text), 30)):
        assert parse(text, size, **options) == whole, size
    return whole


TEXTS: list[tuple[str, list[Piece]]] = [
    ("", []),
    ("plain text\n\n", ["plain text\n\n"]),
    ("\n\nHello < world <tool", ["\n\nHello < world <tool"]),
    (CALL, [F]),
    ("Let me see.\n\n" + CALL + "\n", ["Let me see.", F]),
    (CALL + "\n" + CALL.replace('"f"', '"g"'), [F, ToolCall("g", '{"a": 1}')]),
    (CALL + CALL, [F, F]),
    ("a " + CALL + " b " + CALL + " c", ["a", F, "b", F, "c"]),
    (CALL[:-12], [F]),  # the model ended its turn instead of closing the tag
    (CALL[:-5], [F]),  # a stop string did
    (CALL[:-14], [CALL[:-14]]),  # the JSON is not complete
    (CALL.replace("\n", ""), [F]),
    (CALL.replace('"f"', '"unknown"'), [CALL.replace('"f"', '"unknown"')]),
    (CALL.replace('{"a": 1}', "[1]"), [CALL.replace('{"a": 1}', "[1]")]),
    (CALL.replace('"f"', "[1]"), [CALL.replace('"f"', "[1]")]),
    ("<tool_call>nothing</tool_call> then", ["<tool_call>nothing</tool_call> then"]),
    ("<tool_call>\n[" + CALL[12:-13] + "]\n</tool_call>", [F]),
    (CALL.replace("1", "NaN"), [CALL.replace("1", "NaN")]),
    (CALL.replace("1", "1e999"), [CALL.replace("1", "1e999")]),
    (CALL.replace(', "arguments": {"a": 1}', ""), [ToolCall("f", "{}")]),
    (CALL.replace('{"a": 1}', '"{\\"a\\": 1}"'), [F]),
]


@pytest.mark.parametrize(("text", "pieces"), TEXTS, ids=[repr(text) for text, _ in TEXTS])
def test_text_and_calls_are_told_apart(text: str, pieces: list[Piece]) -> None:
    assert both(text) == pieces


@pytest.mark.parametrize(
    "value",
    [
        "}",
        '"}',
        "}]}",
        "</tool_call>",
        'a "quote" \\',
        "Łódź 東京 🎈",
        "line\nbreak",
        '<tool_call>{"',
    ],
)
def test_arguments_survive_whatever_they_hold(value: str) -> None:
    body = json.dumps({"name": "g", "arguments": {"x": [value, {"y": value}]}}, ensure_ascii=False)
    (call,) = both(f"<tool_call>\n{body}\n</tool_call>")
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"x": [value, {"y": value}]}


def test_half_a_surrogate_pair_stays_valid_text() -> None:
    (call,) = both(CALL.replace("1", '"\\ud800"'))
    assert isinstance(call, ToolCall)
    assert call.arguments.encode() == b'{"a": "\\ud800"}'


def test_a_call_that_is_cut_off_is_neither_call_nor_text() -> None:
    for stop in range(len("ok <tool_call>"), len("ok " + CALL)):
        assert both(("ok " + CALL)[:stop], is_cut=True) == ["ok"]
    assert both("ok " + CALL, is_cut=True) == ["ok", F]
    assert both("ok <tool", is_cut=True) == ["ok <tool"]
    required = tool_use("required")
    for stop in range(len(CALL)):
        assert both(CALL[:stop], is_cut=True, tools=required) == []


def test_calls_beyond_the_number_that_is_allowed_are_left_out() -> None:
    assert both(CALL + "\n" + CALL, tools=tool_use(parallel=False)) == [F]
    named = {"type": "function", "function": {"name": "f"}}
    assert both(CALL + "\n" + CALL, tools=tool_use(named)) == [F]
    assert both(CALL * 9) == [F] * 8


BARE = '{"name": "f", "parameters": {"a": 1}}'
BARE_TEXTS: list[tuple[str, list[Piece]]] = [
    (BARE, [F]),
    (" \n" + BARE + "; more\n text", [F]),
    ("Hello " + BARE, ["Hello " + BARE]),
    ('{"city": "Oslo"}\n\n and more', ['{"city": "Oslo"}\n\n and more']),
    (BARE[:-1], [BARE[:-1]]),
    ("  ", ["  "]),
    ("", []),
]


@pytest.mark.parametrize(("text", "pieces"), BARE_TEXTS, ids=[repr(text) for text, _ in BARE_TEXTS])
def test_a_bare_call_is_the_whole_answer(text: str, pieces: list[Piece]) -> None:
    assert both(text, form=ToolForm.LLAMA) == pieces
    if pieces != [F]:
        assert both(text, form=ToolForm.LLAMA, is_cut=True) == pieces
    required = tool_use("required")
    assert both(BARE[:-1], form=ToolForm.LLAMA, is_cut=True, tools=required) == []


def test_without_tools_markup_is_text() -> None:
    parser = answer_parser(None, ToolForm.HERMES)
    assert parser.push(CALL) == [CALL]
    assert parser.push("") == parser.finish(is_cut=False) == []


def test_the_form_is_told_from_the_template() -> None:
    assert tool_form_of("{% for message in messages %}") is ToolForm.GENERIC
    assert tool_form_of("{% if tools %}<tool_call>{% endif %}") is ToolForm.HERMES
    assert tool_form_of("{% if tools %}<tool_call><function=x>{% endif %}") is ToolForm.GENERIC
    llama = '{% if tools %}<|start_header_id|>{"name":, "parameters":}{% endif %}'
    assert tool_form_of(llama) is ToolForm.LLAMA
    assert tool_form_of("{% if tools %}[TOOL_CALLS]{% endif %}") is ToolForm.GENERIC
