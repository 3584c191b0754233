"""Runs the HTTP server from the first moment on, and loads the model meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings
from relaykv.server.state import Backend, ServerState

_LOG = logging.getLogger(__name__)

_DRAIN_S = 10  # how long answers in progress may go on after a stop signal


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What loading gives: something to serve with, and how to end it."""

    backend: Backend
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where and how loudly to listen. Port 0 takes a free one."""

    host: str
    port: int
    log_level: str


def run_server(
    load: Callable[[], LoadedModel], settings: ServerSettings, options: ListenOptions
) -> int:
    """Serves until SIGINT or SIGTERM. Returns the process's exit code.

    `load` runs in a thread of its own; /health answers and /ready says 503 meanwhile.
    """
    try:
        listener = _listen(options)
    except OSError as error:
        reason = error.strerror or str(error)
        _complain(f"cannot listen on {options.host} port {options.port}: {reason}")
        return 1
    loader = _Loader(load)
    with listener:
        exit_code = asyncio.run(_serve(listener, loader, settings, options))
    if loader.is_running:
        # Native code that still loads a model does not survive the interpreter's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


class _Loader:
    """Runs a blocking function in a thread that does not hold up the process's end."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._load = load
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def result(self) -> LoadedModel:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LoadedModel] = loop.create_future()

        def deliver(loaded: LoadedModel | None, error: BaseException | None) -> None:
            if future.done():
                return
            if loaded is not None:
                future.set_result(loaded)
            else:
                future.set_exception(error or RuntimeError("loading gave nothing"))

        def work() -> None:
            loaded, error = None, None
            try:
                loaded = self._load()
            except BaseException as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(deliver, loaded, error)

        self._thread = threading.Thread(target=work, name="relaykv-load", daemon=True)
        self._thread.start()
        return await future


async def _serve(
    listener: socket.socket, loader: _Loader, settings: ServerSettings, options: ListenOptions
) -> int:
    state = ServerState(settings)
    config = uvicorn.Config(
        create_app(state),
        log_level=options.log_level,
        ws="none",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = uvicorn.Server(config)
    # uvicorn raises a caught signal once more when it has stopped; a stop is no failure here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)
    loading = asyncio.create_task(_attach(state, loader, server, _url(listener)))
    await server.serve(sockets=[listener])
    if not loading.done():
        loading.cancel()
        return 0
    loaded = loading.result()
    if loaded is None:
        return 1
    loaded.close()
    return 0


async def _attach(
    state: ServerState, loader: _Loader, server: uvicorn.Server, url: str
) -> LoadedModel | None:
    start = time.monotonic()
    print(f"RelayKV listens on {url} and loads the model", flush=True)
    try:
        loaded = await loader.result()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        _LOG.debug("loading failed", exc_info=True)
        _complain(f"cannot load the model: {str(error) or type(error).__name__}")
        server.should_exit = True
        return None
    state.attach(loaded.backend)
    seconds = time.monotonic() - start
    name = loaded.backend.engine.model.name
    print(f"RelayKV is ready at {url}/v1 (model {name}, loaded in {seconds:.1f} s)", flush=True)
    return loaded


def _listen(options: ListenOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return socket.create_server((options.host, options.port), family=family, backlog=2048)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _complain(message: str) -> None:
    print(f"relaykv: error: {message}", file=sys.stderr, flush=True)
