"""What an answer must look like: `response_format` and tools as one grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relaykv.engine.grammar import GrammarError, check_grammar, json_rule
from relaykv.engine.request import GrammarKind, GrammarSpec
from relaykv.server.errors import bad_request, json_kind
from relaykv.server.tool_form import CLOSE_TAG, OPEN_TAG, ToolForm
from relaykv.server.tools import Function, ToolUse

_FORMAT = "response_format"
_SCHEMA = f"{_FORMAT}.json_schema.schema"


def read_response_format(value: Any) -> Mapping[str, Any] | None:
    """The schema that an answer's text must satisfy; None when it may be anything.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    if value is None:
        return None
    kind = _object(value, _FORMAT).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        wrapper = _object(value.get("json_schema"), f"{_FORMAT}.json_schema")
        return _object(wrapper.get("schema"), _SCHEMA)
    message = f"Invalid '{_FORMAT}.type': supported are 'text', 'json_object' and 'json_schema'."
    raise bad_request(message, param=f"{_FORMAT}.type")


def output_grammar(
    schema: Mapping[str, Any] | None, tools: ToolUse | None, form: ToolForm
) -> GrammarSpec | None:
    """The grammar of an answer; None when it may be anything. Takes milliseconds.

    Raises:
        ApiError: 400 naming the schema that is malformed, not supported or not satisfiable.
    """
    if tools is None:
        if schema is None:
            return None
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    else:
        lark = _with_tools(schema, tools, form)
        if lark is None:
            _check_parts(None, tools)
            return None
        spec = GrammarSpec(GrammarKind.LARK, lark)
    try:
        check_grammar(spec)
    except GrammarError as error:
        _check_parts(schema, tools)
        message = f"These tools cannot be used together: {error}"
        raise bad_request(message, param="tools") from error
    return spec


def _with_tools(schema: Mapping[str, Any] | None, tools: ToolUse, form: ToolForm) -> str | None:
    """Lark for an answer that may or must call tools."""
    newline = _literal("\n")
    if form.is_tagged:
        body = f"{newline} function {newline} {_literal(CLOSE_TAG)}"
        call = f"{_literal(OPEN_TAG)} {body}"
        more = f" ({newline} call){{0,{tools.max_calls - 1}}}" if tools.max_calls > 1 else ""
    else:
        call, body, more = "function", "", ""  # templates of this form allow one call
    rules = [f"call: {call}", *_function_rules(tools, form)]
    if tools.is_forced:
        start = f"call{more}"
    elif schema is not None:
        start = f"answer | call{more}"
        rules.append(f"answer: {json_rule(schema)}")
    elif form.is_tagged:
        # Free text, but what follows an opening tag is a call. Lazy: the first tag counts.
        start = f"TEXT | opened {body}{more}"
        rules += [f"opened[lazy]: TEXT {_literal(OPEN_TAG)}", "TEXT: /(.|\\n)*/"]
    else:
        return None
    return "\n".join([f"start: {start}", *rules])


def _function_rules(tools: ToolUse, form: ToolForm) -> list[str]:
    functions = range(len(tools.callable))
    rules = ["function: " + " | ".join(f"function_{index}" for index in functions)]
    for index, function in enumerate(tools.callable):
        start = f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
        rules.append(f'function_{index}: {_literal(start)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {_arguments(function, tools)}")
    return rules


def _arguments(function: Function, tools: ToolUse) -> str:
    is_exact = function.strict or tools.is_forced
    return json_rule(function.parameters, lenient=not is_exact)


def _check_parts(schema: Mapping[str, Any] | None, tools: ToolUse | None) -> None:
    """Finds the schema at fault."""
    if schema is not None:
        _check_part(json_rule(schema), _SCHEMA)
    if tools is not None:
        for function in tools.callable:
            param = f"tools[{function.index}].function.parameters"
            _check_part(_arguments(function, tools), param)


def _check_part(rule: str, param: str) -> None:
    try:
        check_grammar(GrammarSpec(GrammarKind.LARK, f"start: {rule}"))
    except GrammarError as error:
        message = f"Invalid schema for '{param}': {error}"
        raise bad_request(message, param=param) from error


def _literal(text: str) -> str:
    return json.dumps(text)


def _object(value: Any, param: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    if value is None:
        raise bad_request(f"Missing required parameter: '{param}'.", param=param)
    message = f"Invalid type for '{param}': expected an object, but got {json_kind(value)} instead."
    raise bad_request(message, param=param)
