"""The items of /v1/responses as messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from relaykv.server.errors import bad_request, from_validation, json_kind
from relaykv.server.protocol import CalledFunction, ChatMessage, MessageToolCall

Item = Mapping[str, Any]


def messages_of_input(
    value: str | Sequence[Any], find_item: Callable[[str], Item | None]
) -> list[ChatMessage]:
    """Messages of an `input`; `find_item` looks up what an item reference names.

    A text and the calls behind it are one message, as the model wrote them.

    Raises:
        ApiError: 400 naming the item that is wrong or not supported.
    """
    if isinstance(value, str):
        return [ChatMessage(role="user", content=value)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            param = f"input[{index}]"
            message = f"Invalid type for '{param}': expected an object, but got {json_kind(item)}."
            raise bad_request(message, param=param)
        _add(messages, index, _resolved(item, index, find_item))
    return messages


def _resolved(item: Item, index: int, find_item: Callable[[str], Item | None]) -> Item:
    if item.get("type") != "item_reference":
        return item
    name = item.get("id")
    found = find_item(name) if isinstance(name, str) else None
    if found is None:
        message = f"Item with id '{name}' not found; items of unstored responses are not kept."
        raise bad_request(message, param=f"input[{index}].id")
    return found


def _add(messages: list[ChatMessage], index: int, item: Item) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        messages.append(_message(item, ("input", index)))
    elif kind == "function_call":
        call = _tool_call(item, index)
        if messages and messages[-1].role == "assistant":
            calls = [*(messages[-1].tool_calls or ()), call]
            messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
        else:
            messages.append(ChatMessage(role="assistant", tool_calls=[call]))
    elif kind == "function_call_output":
        call_id = _string(item, "call_id", index)
        if "output" not in item:
            param = f"input[{index}].output"
            raise bad_request(f"Missing required parameter: '{param}'.", param=param)
        values = {"role": "tool", "content": item["output"], "tool_call_id": call_id}
        messages.append(_message(values, ("input", index), {"content": "output"}))
    elif kind != "reasoning":  # thoughts are not part of a conversation
        message = f"Items of type '{kind}' are not supported by this server."
        raise bad_request(message, param=f"input[{index}].type")


def _message(
    values: Item, at: tuple[str, int], names: Mapping[str, str] | None = None
) -> ChatMessage:
    try:
        return ChatMessage.model_validate(values)
    except ValidationError as error:
        fault = from_validation(error, at)
        if fault.param is None:
            raise fault from None
        param, message = fault.param, fault.message
        for theirs, ours in (names or {}).items():
            param, message = param.replace(theirs, ours), message.replace(theirs, ours)
        raise bad_request(message, param=param, code=fault.code) from None


def _tool_call(item: Item, index: int) -> MessageToolCall:
    name, arguments = _string(item, "name", index), _string(item, "arguments", index)
    function = CalledFunction(name=name, arguments=arguments)
    return MessageToolCall(id=_string(item, "call_id", index), function=function)


def _string(item: Item, field: str, index: int) -> str:
    value, param = item.get(field), f"input[{index}].{field}"
    if value is None:
        raise bad_request(f"Missing required parameter: '{param}'.", param=param)
    if not isinstance(value, str):
        kind = json_kind(value)
        message = f"Invalid type for '{param}': expected a string, but got {kind} instead."
        raise bad_request(message, param=param)
    return value
