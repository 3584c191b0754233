"""Tools, calls and their results as plain messages, for templates that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relaykv.server.tool_form import CLOSE_TAG, OPEN_TAG

_INSTRUCTIONS = """\
# Tools

You can call functions to help the user. The functions are described here, one per line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between tags:
{open}
{{"name": "function_name", "arguments": {{"argument_name": "value"}}}}
{close}"""


def plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template without tools.

    Tools are described in the system message, calls are part of their message's text, and the
    results that follow each other are one message of the user.
    """
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and after_result:
            plain[-1]["content"] += "\n" + _result(message)
        elif is_result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls_as_text(message))
        after_result = is_result
    return _with_instructions(plain, tools) if tools else plain


def _with_instructions(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    lines = "\n".join(_json(tool) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, open=OPEN_TAG, close=CLOSE_TAG)
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *messages]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = _json({"name": function["name"], "arguments": function.get("arguments", {})})
        texts.append(f"{OPEN_TAG}\n{body}\n{CLOSE_TAG}")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(texts)}


def _result(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
