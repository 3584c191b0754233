"""A streamed chat completion: the engine's outputs as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaykv.engine.client import EngineClient, EngineDeadError
from relaykv.engine.request import RequestOutput
from relaykv.server.chat import ChatPlan, choice_logprobs
from relaykv.server.choices import ChoiceOutputs
from relaykv.server.disconnect import until_disconnect
from relaykv.server.errors import ApiError, engine_dead
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.responses import (
    ChatCompletionChunk,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    RelayResult,
    finish_reason_text,
    relay_result,
    usage_body,
    wire_json,
)

_LOG = logging.getLogger(__name__)

_KEEPALIVE = ": keepalive\n\n"
_DONE = "data: [DONE]\n\n"
_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks nginx to pass events on at once
}


class EventStreamResponse(Response):
    """Sends events as they come; a client that goes away ends their generator."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await until_disconnect(receive, self._send_events(send))
        except (ClientDisconnect, OSError):
            _LOG.debug("client went away during a stream")

    async def _send_events(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            await send(start)
            async for event in events:
                body = event.encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_chat(
    plan: ChatPlan, engine: EngineClient, tokenizer: ServerTokenizer, keepalive_s: float
) -> AsyncGenerator[str, None]:
    """Yields the events of an answer; a failure is the last event, without `[DONE]`."""
    frames = _ChunkWriter(plan, tokenizer)
    try:
        async with ChoiceOutputs(engine, plan.requests) as outputs:
            while True:
                try:
                    async with asyncio.timeout(keepalive_s):
                        item = await outputs.next()
                except TimeoutError:
                    yield _KEEPALIVE
                    continue
                if item is None:
                    break
                for chunk in frames.chunks(*item):
                    yield _data(chunk)
        if plan.include_usage:
            yield _data(frames.usage_chunk())
        yield _DONE
    except ApiError as error:
        yield _error(error)
    except EngineDeadError:
        yield _error(engine_dead())
    except Exception:
        # The headers are out, so that no handler can turn this into a status.
        _LOG.exception("a streamed completion failed")
        yield _error(ApiError(500, "The server had an error while processing your request."))


class _ChunkWriter:
    """Makes the chunks of one answer."""

    def __init__(self, plan: ChatPlan, tokenizer: ServerTokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._last: dict[int, RequestOutput] = {}
        self._relay: dict[int, RelayResult] = {}

    def chunks(self, index: int, output: RequestOutput) -> list[ChatCompletionChunk]:
        """The role once, the new text if there is any, the end with its reason."""
        chunks = []
        if index not in self._last:
            chunks.append(self._chunk(index, Delta(role="assistant", content="")))
        self._last[index] = output
        if output.relay is not None and self._plan.requests[index].relay.session is not None:
            self._relay[index] = relay_result(output.relay, self._plan.explain)
        logprobs = choice_logprobs(output.logprobs, self._tokenizer) if output.logprobs else None
        if output.text or logprobs is not None:
            chunks.append(self._chunk(index, Delta(content=output.text), logprobs=logprobs))
        if output.finish_reason is not None:
            reason = finish_reason_text(output.finish_reason)
            chunks.append(self._with_relay(self._chunk(index, Delta(), reason=reason), index))
        return chunks

    def usage_chunk(self) -> ChatCompletionChunk:
        """The token counts of all choices, whose prompt counts once."""
        num_output_tokens = sum(output.usage.num_output_tokens for output in self._last.values())
        chunk = self._empty_chunk([])
        chunk.usage = usage_body(self._last[0].usage, num_output_tokens)
        return self._with_relay(chunk, 0)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChoiceLogprobs | None = None,
        reason: str | None = None,
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        chunk = self._empty_chunk([choice])
        if self._plan.include_usage:
            chunk.usage = None  # OpenAI sends a null in every chunk but the last then
        return chunk

    def _empty_chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._plan.completion_id,
            object="chat.completion.chunk",
            created=self._plan.created,
            model=self._plan.model,
            choices=choices,
            system_fingerprint=self._plan.system_fingerprint,
        )

    def _with_relay(self, chunk: ChatCompletionChunk, index: int) -> ChatCompletionChunk:
        if index in self._relay:
            chunk.relay = self._relay[index]
        return chunk


def _data(chunk: ChatCompletionChunk) -> str:
    return f"data: {wire_json(chunk)}\n\n"


def _error(error: ApiError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"
