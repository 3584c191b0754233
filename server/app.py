"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from relaykv.server.chat_route import create_chat_completion
from relaykv.server.errors import install_error_handlers
from relaykv.server.middleware import RequestIdMiddleware, UrlMiddleware
from relaykv.server.routes import build_router
from relaykv.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """Builds the application around a state that may get its backend later."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    # The bodies are read as JSON by hand, so that a generated schema would say nothing.
    app = FastAPI(
        title="RelayKV",
        version=state.settings.version,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    app.include_router(build_router())
    install_error_handlers(app)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(UrlMiddleware)
    return app
