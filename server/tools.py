"""Which functions an answer may call, and how: the tool fields of a body as one value."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaykv.server.errors import bad_request, json_kind
from relaykv.server.protocol import FunctionTool

# A small model that is made to call may repeat itself for as long as the grammar lets it.
MAX_PARALLEL_CALLS = 8


class ToolChoice(enum.Enum):
    """What an answer may be."""

    AUTO = "auto"  # text, calls or both
    REQUIRED = "required"  # calls only
    NAMED = "named"  # one call of one function


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool  # its arguments satisfy the schema even when the call is the model's own choice
    index: int  # in the body's tools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. A request whose choice is `none` has no such value."""

    definitions: tuple[dict[str, Any], ...]  # all that are offered, as templates render them
    callable: tuple[Function, ...]  # those that may be called
    choice: ToolChoice
    max_calls: int

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls alone."""
        return self.choice is not ToolChoice.AUTO


def read_tool_use(
    tools: Sequence[FunctionTool] | None, tool_choice: Any, parallel: bool | None
) -> ToolUse | None:
    """The tools of a body; None when there are none or none may be called.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    choice, name = _read_choice(tool_choice)
    if not tools:
        if choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
            raise bad_request("'tool_choice' needs 'tools'.", param="tool_choice")
        return None
    functions = tuple(_function(index, tool) for index, tool in enumerate(tools))
    _refuse_doubles(functions)
    if choice is None:
        return None
    if choice is ToolChoice.NAMED:
        functions = tuple(function for function in functions if function.name == name)
        if not functions:
            message = f"'tool_choice' names the function '{name}', which is not in 'tools'."
            raise bad_request(message, param="tool_choice")
    one_call = choice is ToolChoice.NAMED or parallel is False
    return ToolUse(
        definitions=tuple(_definition(tool) for tool in tools),
        callable=functions,
        choice=choice,
        max_calls=1 if one_call else MAX_PARALLEL_CALLS,
    )


def _read_choice(value: Any) -> tuple[ToolChoice | None, str]:
    """The choice, None for `none`, and the name of a function that must be called."""
    if value is None or value == "auto":
        return ToolChoice.AUTO, ""
    if value == "none":
        return None, ""
    if value == "required":
        return ToolChoice.REQUIRED, ""
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice.NAMED, name
        message = "A 'tool_choice' of type 'function' needs a string in 'function.name'."
        raise bad_request(message, param="tool_choice.function.name")
    if isinstance(value, str | dict):
        message = (
            "Invalid value for 'tool_choice': supported are 'auto', 'none', 'required' and "
            '{"type": "function", "function": {"name": ...}}.'
        )
        raise bad_request(message, param="tool_choice")
    kind = json_kind(value)
    message = f"Invalid type for 'tool_choice': expected a string or an object, but got {kind}."
    raise bad_request(message, param="tool_choice")


def _function(index: int, tool: FunctionTool) -> Function:
    parameters = dict(tool.function.parameters or {})
    if parameters.setdefault("type", "object") != "object":
        param = f"tools[{index}].function.parameters"
        raise bad_request(f"Invalid '{param}': its type must be 'object'.", param=param)
    if "properties" not in parameters and tool.function.parameters is None:
        parameters["additionalProperties"] = False  # a function without parameters
    return Function(tool.function.name, parameters, bool(tool.function.strict), index)


def _refuse_doubles(functions: Sequence[Function]) -> None:
    names: set[str] = set()
    for function in functions:
        if function.name in names:
            param = f"tools[{function.index}].function.name"
            message = f"Invalid '{param}': there is another tool named '{function.name}'."
            raise bad_request(message, param=param)
        names.add(function.name)


def _definition(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
