"""A streamed response: a chat completion's chunks as the events of /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from relaykv.server.chat import AnswerPlan
from relaykv.server.errors import ApiError
from relaykv.server.event_stream import guarded_events
from relaykv.server.response_body import (
    MessageItem,
    OutputItem,
    ResponseBody,
    call_item,
    message_item,
    new_id,
    output_text,
    response_body,
    status_of,
)
from relaykv.server.response_protocol import ResponseRequest
from relaykv.server.responses import (
    ChatCompletionChunk,
    RelayResult,
    TokenLogprobBody,
    ToolCallDelta,
    UsageBody,
    wire_json,
)


def stream_response(
    body: ResponseRequest,
    plan: AnswerPlan,
    chunks: AsyncGenerator[ChatCompletionChunk | None, None],
    on_end: Callable[[ResponseBody], None],
) -> AsyncGenerator[str, None]:
    """Yields the events of a response. `on_end` gets it in front of the last event.

    A failure is the event `response.failed`, which is the last one then.
    """
    writer = _EventWriter(body, plan)

    async def events() -> AsyncGenerator[str | None, None]:
        for event in writer.start():
            yield event
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk is None:
                    yield None
                    continue
                for event in writer.add(chunk):
                    yield event
        for event in writer.close_item():
            yield event
        response = writer.response()
        on_end(response)
        yield writer.end(response)

    return guarded_events(events(), writer.failure)


class _Event(BaseModel):
    """One event; its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


@dataclass(slots=True)
class _OpenItem:
    """The output item that is being written."""

    item_id: str
    call: dict[str, str] | None  # id and name of a function call; None for a message
    text: str = ""  # or the call's arguments
    logprobs: list[TokenLogprobBody] = field(default_factory=list)

    def item(self, status: str) -> OutputItem:
        if self.call is None:
            return message_item(self.item_id, status, self.text, self.logprobs)
        return call_item(self.item_id, status, self.call["id"], self.call["name"], self.text)


class _EventWriter:
    """Makes the events of one response. At most one output item is open at a time."""

    def __init__(self, body: ResponseRequest, plan: AnswerPlan) -> None:
        self._body = body
        self._plan = plan
        self._num_events = 0
        self._output: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._open_call_index = -1
        self._logprobs: list[TokenLogprobBody] = []  # of tokens whose text is yet to come
        self._finish_reason: str | None = None
        self._usage: UsageBody | None = None
        self._relay: RelayResult | None = None

    def start(self) -> list[str]:
        """The events in front of the first token."""
        response = response_body(self._body, self._plan, "in_progress")
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=response) for name in names]

    def add(self, chunk: ChatCompletionChunk) -> list[str]:
        """The events that a chunk causes."""
        self._usage = chunk.usage or self._usage
        self._relay = chunk.relay or self._relay
        events: list[str] = []
        for choice in chunk.choices:
            if choice.logprobs is not None:
                self._logprobs += choice.logprobs.content
            if choice.delta.content or self._is_message_open:
                events += self._add_text(choice.delta.content)
            for call in choice.delta.tool_calls:
                events += self._add_call(call)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return events

    def close_item(self) -> list[str]:
        """The events that end the open item; one without text when there was none at all."""
        events = []
        if self._open is None and not self._output:
            events += self._open_item(_OpenItem(new_id("msg"), None))
        return events + self._close(status_of(self._finish_reason))

    def response(self) -> ResponseBody:
        """The response once its chunks have ended."""
        status = status_of(self._finish_reason)
        return response_body(
            self._body, self._plan, status, self._output, usage=self._usage, relay=self._relay
        )

    def end(self, response: ResponseBody) -> str:
        """The last event of a regular end."""
        return self._event(f"response.{response.status}", response=response)

    def failure(self, error: ApiError) -> str:
        """The last event of a failed response."""
        fault = {"code": "server_error", "message": error.message}
        response = response_body(self._body, self._plan, "failed", self._output, error=fault)
        return self._event("response.failed", response=response)

    @property
    def _is_message_open(self) -> bool:
        return self._open is not None and self._open.call is None

    def _add_text(self, text: str) -> list[str]:
        events: list[str] = []
        if not self._is_message_open:
            events += self._close("completed")
            events += self._open_item(_OpenItem(new_id("msg"), None))
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        if not text and not logprobs:
            return events
        self._open.text += text
        self._open.logprobs.extend(logprobs)
        delta = {"delta": text, "logprobs": logprobs}
        events.append(self._part_event("response.output_text.delta", **delta))
        return events

    def _add_call(self, call: ToolCallDelta) -> list[str]:
        events = []
        if self._open is None or self._open.call is None or call.index != self._open_call_index:
            events += self._close("completed")
            self._open_call_index = call.index
            named = {"id": call.id, "name": call.function.name}
            events += self._open_item(_OpenItem(new_id("fc"), named))
        assert self._open is not None
        if fragment := call.function.arguments:
            self._open.text += fragment
            name = "response.function_call_arguments.delta"
            events.append(self._item_event(name, delta=fragment))
        return events

    def _open_item(self, opened: _OpenItem) -> list[str]:
        self._open = opened
        item = opened.item("in_progress")
        if isinstance(item, MessageItem):
            item.content = []
        events = [self._output_event("response.output_item.added", item)]
        if opened.call is None:
            events.append(self._part_event("response.content_part.added", part=output_text("")))
        return events

    def _close(self, status: str) -> list[str]:
        if self._open is None:
            return []
        opened, item = self._open, self._open.item(status)
        if opened.call is None:
            done = {"text": opened.text, "logprobs": opened.logprobs}
            part = output_text(opened.text, opened.logprobs)
            events = [
                self._part_event("response.output_text.done", **done),
                self._part_event("response.content_part.done", part=part),
            ]
        else:
            name = "response.function_call_arguments.done"
            arguments = {"name": opened.call["name"], "arguments": opened.text}
            events = [self._item_event(name, **arguments)]
        events.append(self._output_event("response.output_item.done", item))
        self._output.append(item)
        self._open = None
        return events

    def _output_event(self, name: str, item: OutputItem) -> str:
        return self._event(name, output_index=len(self._output), item=item)

    def _part_event(self, kind: str, **fields: Any) -> str:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> str:
        assert self._open is not None
        place = {"item_id": self._open.item_id, "output_index": len(self._output)}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        event = _Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return f"event: {kind}\ndata: {wire_json(event)}\n\n"
