"""The real `EngineClient`: one engine thread, asyncio on the other side of two queues."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.client import EngineDeadError, EngineStats, ModelCard, SessionInfo
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.relay_profile import ChosenBands
from relaykv.engine.request import FinishReason, GenerateRequest, RequestOutput

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do in the engine thread, between two steps."""

    run: Callable[[], None]
    refuse: Callable[[Exception], None]  # called instead when the engine has ended


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
    else that touches `_core` and `_sinks` is posted to the inbox and runs in the engine thread.
    """

    def __init__(self, core: EngineCore, parts: EngineParts) -> None:
        self.folder = parts.folder  # the model's, for its chat template
        self.tokenizer = parts.tokenizer
        self._core = core
        self._model = parts.card
        self._policies = tuple(parts.policies)
        self._relay_bands = parts.relay_bands
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = threading.Lock()  # so that no command is posted behind the last look
        self._closed = False
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

    @property
    def relay_bands(self) -> ChosenBands:
        return self._relay_bands

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread after its current step; unfinished requests get an error."""
        with contextlib.suppress(EngineDeadError):
            self._post(_Command(self._stop, lambda _: None))
        if self._thread.is_alive():
            self._thread.join()

    def is_alive(self) -> bool:
        return self._died is None and not self._stopping

    def is_ready(self) -> bool:
        return self._thread.is_alive() and self.is_alive()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if request.sampling.grammar is not None:
            await asyncio.to_thread(self._core.prepare, request)
        sink = _Sink(asyncio.get_running_loop())
        self._post(_Command(lambda: self._add(request, sink), sink.put))
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
            if not finished:
                with contextlib.suppress(EngineDeadError):
                    abort = _Command(lambda: self._abort(request.request_id), lambda _: None)
                    self._post(abort)

    async def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        return await self._ask(lambda: self._core.sessions(tenant))

    async def delete_session(self, tenant: str, session: str) -> bool:
        return await self._ask(lambda: self._core.delete_session(tenant, session))

    async def stats(self) -> EngineStats:
        return await self._ask(self._core.stats)

    def _post(self, command: _Command) -> None:
        with self._closing:
            if self._closed:
                raise EngineDeadError("the engine has ended") from self._died
            self._inbox.put(command)

    async def _ask(self, question: Callable[[], _T]) -> _T:
        """Runs a function in the engine thread, between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()

        def settle(value: _T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast(_T, value))

        def refuse(error: Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, None, error)

        def run() -> None:
            try:
                value = question()
            except Exception as error:
                refuse(error)
            else:
                loop.call_soon_threadsafe(settle, value, None)

        self._post(_Command(run, refuse))
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
        self._close()

    def _close(self) -> None:
        """Tells everyone who waits that nothing more will come."""
        with self._closing:
            self._closed = True
        error = EngineDeadError("the engine has ended")
        for sink in self._sinks.values():
            sink.put(error)
        self._sinks.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().refuse(error)

    def _take_commands(self) -> None:
        """Runs all posted commands; waits for one when there is nothing else to do."""
        if not self._core.has_work:
            self._inbox.get().run()
        while not self._stopping:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command.run()

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
