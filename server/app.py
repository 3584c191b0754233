"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from relaykv.server.chat_route import create_chat_completion
from relaykv.server.errors import install_error_handlers
from relaykv.server.middleware import RequestIdMiddleware, UrlMiddleware
from relaykv.server.response_route import create_response, delete_response, show_response
from relaykv.server.routes import build_router
from relaykv.server.state import ServerState
from relaykv.server.text_route import create_text_completion


def create_app(state: ServerState) -> FastAPI:
    """Builds the application around a state that may get its backend later."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    # The bodies are read as JSON by hand: openapi.py writes the document that says so.
    app = FastAPI(
        title="RelayKV",
        version=state.settings.version,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    app.add_api_route("/v1/completions", create_text_completion, methods=["POST"])
    app.add_api_route("/v1/responses", create_response, methods=["POST"])
    app.add_api_route("/v1/responses/{response_id}", show_response, methods=["GET"])
    app.add_api_route("/v1/responses/{response_id}", delete_response, methods=["DELETE"])
    app.include_router(build_router())
    install_error_handlers(app)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(UrlMiddleware)
    return app
