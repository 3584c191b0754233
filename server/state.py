"""What a running server holds: its settings and, once the model is loaded, its backend."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from relaykv.engine.client import EngineClient
from relaykv.server.errors import ApiError, engine_dead
from relaykv.server.prompt import PromptBuilder
from relaykv.server.response_store import ResponseStore
from relaykv.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine and the prompts that fit its model."""

    engine: EngineClient
    prompts: PromptBuilder


class ServerState:
    """The server may start before its backend: it answers 503 until one is attached."""

    def __init__(self, settings: ServerSettings, backend: Backend | None = None) -> None:
        self.settings = settings
        self.responses = ResponseStore(settings)
        self._backend = backend

    def attach(self, backend: Backend) -> None:
        """Starts serving. Belongs to the event loop's thread."""
        self._backend = backend

    def close(self) -> None:
        """Ends the prompt threads; the engine belongs to whoever made it."""
        if self._backend is not None:
            self._backend.prompts.close()

    @property
    def is_alive(self) -> bool:
        """False once the engine has died; loading counts as alive."""
        return self._backend is None or self._backend.engine.is_alive()

    @property
    def is_ready(self) -> bool:
        """True when a request would be served now."""
        return self._backend is not None and self.is_alive and self._backend.engine.is_ready()

    def backend(self) -> Backend:
        """The backend, to serve a request with.

        Raises:
            ApiError: 503 while the model loads and after the engine has died.
        """
        if not self.is_alive:
            raise engine_dead()
        if self._backend is None or not self._backend.engine.is_ready():
            headers = {"Retry-After": str(self.settings.retry_after_s)}
            message = "The model is still loading; try again in a few seconds."
            raise ApiError(503, message, code="model_loading", headers=headers)
        return self._backend


def state_of(request: Request) -> ServerState:
    """The state of the application that got the request."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state
