"""Server-sent events: how a stream is sent, kept alive in silence, and ended by a failure."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaykv.engine.client import EngineDeadError
from relaykv.engine.request import RequestOutput
from relaykv.server.choices import ChoiceOutputs
from relaykv.server.disconnect import until_disconnect
from relaykv.server.errors import ApiError, engine_dead

_LOG = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
_KEEPALIVE = ": keepalive\n\n"
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


def error_event(error: ApiError) -> str:
    """A failure as an event without a name, which every client raises as an exception."""
    return f"data: {json.dumps(error.body())}\n\n"


async def guarded_events(
    events: AsyncGenerator[str | None, None], on_error: Callable[[ApiError], str] = error_event
) -> AsyncGenerator[str, None]:
    """Passes events on, writes a comment for None, and makes a failure the last event."""
    try:
        async with aclosing(events):
            async for event in events:
                yield _KEEPALIVE if event is None else event
    except ApiError as error:
        yield on_error(error)
    except EngineDeadError:
        yield on_error(engine_dead())
    except Exception:
        # The headers are out, so that no handler can turn this into a status.
        _LOG.exception("a streamed answer failed")
        yield on_error(ApiError(500, "The server had an error while processing your request."))


async def outputs_or_silence(
    outputs: ChoiceOutputs, keepalive_s: float
) -> AsyncGenerator[tuple[int, RequestOutput] | None, None]:
    """The outputs of all choices as they come; None whenever there was none for a while.

    Raises:
        ApiError: 500, a choice failed.
        EngineDeadError: the engine has ended.
    """
    while True:
        try:
            async with asyncio.timeout(keepalive_s):
                item = await outputs.next()
        except TimeoutError:
            yield None
            continue
        if item is None:
            return
        yield item
