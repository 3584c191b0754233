"""What /v1/responses answers: the response object and its output items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from relaykv.server.chat import AnswerPlan
from relaykv.server.response_protocol import ResponseRequest
from relaykv.server.responses import ChatCompletion, RelayResult, TokenLogprobBody, UsageBody


class OutputText(BaseModel):
    """The text of a message."""

    type: str
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprobBody]  # empty unless asked for


class MessageItem(BaseModel):
    """An output item that is text."""

    id: str
    type: str
    status: str
    role: str
    content: list[OutputText]


class CallItem(BaseModel):
    """An output item that calls a function."""

    id: str
    type: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | CallItem


class InputTokensDetails(BaseModel):
    """`cached_tokens` counts what was not computed again: exact prefix hits and relayed KV."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Kept for clients that add it up."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts in this API's words."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(BaseModel):
    """The response object; what the request asked for is told back."""

    id: str
    object: str
    created_at: int
    status: str
    background: bool
    completed_at: int | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, None]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: None
    metadata: dict[str, Any]
    relay: RelayResult | None = None


def response_body(
    body: ResponseRequest,
    plan: AnswerPlan,
    status: str,
    output: Sequence[OutputItem] = (),
    *,
    usage: UsageBody | None = None,
    relay: RelayResult | None = None,
    error: dict[str, str] | None = None,
) -> ResponseBody:
    """The response object: `status` is in_progress, completed, incomplete or failed."""
    text_format = body.text.format if body.text is not None else None
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    response = ResponseBody(
        id=plan.completion_id,
        object="response",
        created_at=plan.created,
        status=status,
        background=False,
        completed_at=int(time.time()) if status == "completed" else None,
        error=error,
        incomplete_details=incomplete,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=None,
        model=plan.model,
        output=list(output),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id or None,
        reasoning={"effort": None, "summary": None},
        service_tier="default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": text_format.told_back() if text_format else {"type": "text"}},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[tool.told_back() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation="disabled",
        usage=_usage(usage) if usage is not None else None,
        user=None,
        metadata=body.metadata if isinstance(body.metadata, dict) else {},
    )
    if relay is not None:
        response.relay = relay
    return response


def completed_response(
    body: ResponseRequest, plan: AnswerPlan, completion: ChatCompletion
) -> ResponseBody:
    """A finished chat completion as a response."""
    choice = completion.choices[0]
    status = status_of(choice.finish_reason)
    text, calls = choice.message.content or "", choice.message.tool_calls
    output: list[OutputItem] = []
    if text or not calls:
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        output.append(message_item(new_id("msg"), status, text, logprobs))
    for call in calls:
        name, arguments = call.function.name, call.function.arguments
        output.append(call_item(new_id("fc"), status, call.id, name, arguments))
    relay = completion.relay
    return response_body(body, plan, status, output, usage=completion.usage, relay=relay)


def message_item(
    item_id: str, status: str, text: str, logprobs: Sequence[TokenLogprobBody] = ()
) -> MessageItem:
    """A message with one text."""
    part = output_text(text, logprobs)
    return MessageItem(id=item_id, type="message", status=status, role="assistant", content=[part])


def output_text(text: str, logprobs: Sequence[TokenLogprobBody] = ()) -> OutputText:
    """The content of a message."""
    return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))


def call_item(item_id: str, status: str, call_id: str, name: str, arguments: str) -> CallItem:
    """A function call."""
    return CallItem(
        id=item_id,
        type="function_call",
        status=status,
        call_id=call_id,
        name=name,
        arguments=arguments,
    )


def new_id(prefix: str) -> str:
    """An id nobody has had."""
    return f"{prefix}_{secrets.token_hex(12)}"


def status_of(finish_reason: str | None) -> str:
    """The status of a response whose answer ended so."""
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: UsageBody) -> ResponseUsage:
    cached_tokens = usage.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached_tokens, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
    )
