"""Runs the choices of one answer at the same time and merges what they produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from relaykv.engine.client import EngineClient
from relaykv.engine.request import FinishReason, GenerateRequest, RequestOutput
from relaykv.server.errors import ApiError

_Event = tuple[int, RequestOutput | Exception | None]  # None: that choice has ended


class ChoiceOutputs:
    """Outputs of all choices in order of arrival; leaving the context aborts what still runs.

    Choices after the first start when the first has produced something: by then the prompt is in
    the prefix cache, so that it is computed once.
    """

    def __init__(self, engine: EngineClient, requests: Sequence[GenerateRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_ended = 0

    async def __aenter__(self) -> ChoiceOutputs:
        self._start(0)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The next output with its choice's index; None when every choice has ended.

        Cancelling the wait loses nothing.

        Raises:
            ApiError: 500, a choice failed.
            EngineDeadError: the engine has ended.
        """
        while self._num_ended < len(self._requests):
            index, event = await self._events.get()
            if len(self._tasks) < len(self._requests):
                for later in range(1, len(self._requests)):
                    self._start(later)
            if isinstance(event, Exception):
                raise event
            if event is not None:
                return index, _regular(event)
            self._num_ended += 1
        return None

    def _start(self, index: int) -> None:
        self._tasks.append(asyncio.create_task(self._pump(index, self._requests[index])))

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        try:
            outputs = self._engine.generate(request)
            try:
                async for output in outputs:
                    self._events.put_nowait((index, output))
            finally:
                await _close(outputs)
        except Exception as error:  # handed over: it is raised where the answer is made
            self._events.put_nowait((index, error))
        else:
            self._events.put_nowait((index, None))


def _regular(output: RequestOutput) -> RequestOutput:
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error or "The engine failed to serve this request.")
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "The request was aborted by the server.", code="request_aborted")
    return output


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    # Only generators have it, and only they hold something to release.
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
