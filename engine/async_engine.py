"""The real `EngineClient`: one engine thread, asyncio on the other side of two queues."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.client import EngineDeadError, EngineStats, ModelCard, SessionInfo
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.request import FinishReason, GenerateRequest, RequestOutput

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Sink:
    """Where the outputs of one request go. `put` belongs to the engine thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, item: RequestOutput | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Runs a core in a thread of its own.

    The methods of `EngineClient`, `start` and `stop` belong to the asyncio thread; everything
    that touches `_core` and `_sinks` is posted to the inbox and runs in the engine thread.
    """

    def __init__(self, core: EngineCore, parts: EngineParts) -> None:
        self.folder = parts.folder  # the model's, for its chat template
        self.tokenizer = parts.tokenizer
        self._core = core
        self._model = parts.card
        self._policies = tuple(parts.policies)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, _Sink] = {}
        self._stopping = False
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def model(self) -> ModelCard:
        return self._model

    @property
    def policies(self) -> tuple[str, ...]:
        return self._policies

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread after its current step; unfinished requests get an error."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def is_alive(self) -> bool:
        return self._died is None and not self._stopping

    def is_ready(self) -> bool:
        return self._thread.is_alive() and self.is_alive()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        sink = _Sink(asyncio.get_running_loop())
        self._post(lambda: self._add(request, sink))
        finished = False
        try:
            while not finished:
                item = await sink.queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished and self.is_alive():
                self._inbox.put(lambda: self._abort(request.request_id))

    async def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        return await self._ask(lambda: self._core.sessions(tenant))

    async def delete_session(self, tenant: str, session: str) -> bool:
        return await self._ask(lambda: self._core.delete_session(tenant, session))

    async def stats(self) -> EngineStats:
        return await self._ask(self._core.stats)

    def _post(self, command: Callable[[], None]) -> None:
        if not self.is_alive():
            raise EngineDeadError("the engine has ended") from self._died
        self._inbox.put(command)

    async def _ask(self, question: Callable[[], _T]) -> _T:
        """Runs a function in the engine thread, between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()

        def resolve(value: _T) -> None:
            if not answer.done():
                answer.set_result(value)

        def run() -> None:
            value = question()
            loop.call_soon_threadsafe(resolve, value)

        self._post(run)
        return await answer

    # The rest belongs to the engine thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                for output in self._core.step():
                    self._deliver(output)
        except BaseException as error:
            self._died = error
            _log.exception("the engine thread died")
        for sink in self._sinks.values():
            sink.put(EngineDeadError("the engine has ended"))
        self._sinks.clear()

    def _take_commands(self) -> None:
        """Runs all posted commands; waits for one when there is nothing else to do."""
        if not self._core.has_work:
            self._inbox.get()()
        while not self._stopping:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, request: GenerateRequest, sink: _Sink) -> None:
        try:
            self._core.add(request)
        except ValueError as error:
            sink.put(error)
            return
        self._sinks[request.request_id] = sink

    def _abort(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)
        self._core.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return
        sink.put(output)
        if output.finish_reason not in (None, FinishReason.ABORT):
            del self._sinks[output.request_id]

    def _stop(self) -> None:
        self._stopping = True


def load_engine(options: EngineOptions) -> AsyncEngine:
    """Loads the model and starts an engine for it; takes seconds, in any thread.

    Raises:
        ModelLoadError, UnsupportedModelError, ModelStoreError, ProfileError: one line says why.
        ValueError: an option does not fit the model or the machine.
    """
    parts = prepare(options)
    engine = AsyncEngine(build_core(parts), parts)
    engine.start()
    return engine
