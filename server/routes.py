"""The HTTP routes but for chat: models, tokens, health and relay sessions."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from relaykv.engine.client import ModelCard, SessionInfo
from relaykv.server.body import read_model
from relaykv.server.chat import check_model, check_token_ids, model_names
from relaykv.server.errors import ApiError, bad_request, engine_dead
from relaykv.server.openapi import show_openapi
from relaykv.server.protocol import DetokenizeRequest, TokenizeRequest
from relaykv.server.session import tenant_of
from relaykv.server.state import state_of


def build_router() -> APIRouter:
    """The routes of this file."""
    router = APIRouter()
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/ready", ready, methods=["GET"])
    router.add_api_route("/openapi.json", show_openapi, methods=["GET"])
    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/v1/models/{name:path}", show_model, methods=["GET"])
    router.add_api_route("/tokenize", tokenize, methods=["POST"])
    router.add_api_route("/detokenize", detokenize, methods=["POST"])
    router.add_api_route("/v1/relay", show_relay, methods=["GET"])
    router.add_api_route("/v1/relay/sessions", list_sessions, methods=["GET"])
    session_path = "/v1/relay/sessions/{session:path}"
    router.add_api_route(session_path, show_session, methods=["GET"])
    router.add_api_route(session_path, delete_session, methods=["DELETE"])
    return router


async def health(request: Request) -> JSONResponse:
    """200 while the process can work, loading included."""
    if not state_of(request).is_alive:
        raise engine_dead()
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> JSONResponse:
    """200 when a request would be served now."""
    state_of(request).backend()
    return JSONResponse({"status": "ready"})


async def list_models(request: Request) -> JSONResponse:
    """The model under its names."""
    card = state_of(request).backend().engine.model
    data = [_model_body(name, card) for name in model_names(card)]
    return JSONResponse({"object": "list", "data": data})


async def show_model(request: Request, name: str) -> JSONResponse:
    """The model, under whichever of its names was asked for."""
    card = state_of(request).backend().engine.model
    check_model(name, card)
    return JSONResponse(_model_body(name, card))


async def tokenize(request: Request) -> JSONResponse:
    """Token ids of a text, or of messages as the chat route would see them."""
    state = state_of(request)
    body = await read_model(request, TokenizeRequest, state.settings.max_body_bytes)
    backend = state.backend()
    text = body.prompt if body.text is None else body.text
    if (text is None) == (body.messages is None):
        raise bad_request("Give either 'text' or 'messages'.", param="text")
    if body.messages is not None:
        tokens = await backend.prompts.from_messages(body.messages)
    else:
        tokens = await backend.prompts.from_text(text or "")
    max_model_len = backend.engine.model.max_model_len
    answer = {"count": len(tokens), "tokens": list(tokens), "max_model_len": max_model_len}
    return JSONResponse(answer)


async def detokenize(request: Request) -> JSONResponse:
    """Text of token ids."""
    state = state_of(request)
    body = await read_model(request, DetokenizeRequest, state.settings.max_body_bytes)
    backend = state.backend()
    check_token_ids(body.tokens, backend.engine.model, "tokens")
    return JSONResponse({"text": await backend.prompts.to_text(body.tokens)})


async def show_relay(request: Request) -> JSONResponse:
    """What relaying this server offers, and in which layers the policy `relay` repairs."""
    state = state_of(request)
    engine = state.backend().engine
    chosen, stats = engine.relay_bands, await engine.stats()
    answer = {
        "object": "relay",
        "model": engine.model.name,
        "policies": list(engine.policies),
        # Not always what the server was started with: drift may have moved it to a safer one.
        "default_policy": stats.default_policy or state.settings.default_policy,
        "started_with_policy": state.settings.default_policy,
        "shadow": {
            "policies": [dataclasses.asdict(summary) for summary in stats.shadows],
            "waiting": stats.num_waiting_shadows,
            "dropped": stats.num_dropped_shadows,
        },
        "fingerprint": chosen.fingerprint,
        "bands": dataclasses.asdict(chosen.bands),
        "bands_source": chosen.source,
        # Its name: the folder is nobody's business.
        "profile": None if chosen.path is None else chosen.path.name,
    }
    return JSONResponse(answer)


async def list_sessions(request: Request) -> JSONResponse:
    """The sessions of the caller's API key."""
    sessions = await state_of(request).backend().engine.sessions(tenant_of(request))
    return JSONResponse({"object": "list", "data": [_session_body(info) for info in sessions]})


async def show_session(request: Request, session: str) -> JSONResponse:
    """One session of the caller's API key."""
    sessions = await state_of(request).backend().engine.sessions(tenant_of(request))
    for info in sessions:
        if info.session == session:
            return JSONResponse(_session_body(info))
    raise _no_session(session)


async def delete_session(request: Request, session: str) -> JSONResponse:
    """Drops a session's recordings."""
    engine = state_of(request).backend().engine
    if not await engine.delete_session(tenant_of(request), session):
        raise _no_session(session)
    return JSONResponse({"id": session, "object": "relay.session.deleted", "deleted": True})


def _no_session(session: str) -> ApiError:
    return ApiError(404, f"There is no session '{session}'.", code="session_not_found")


def _model_body(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "relaykv",
        "max_model_len": card.max_model_len,
    }


def _session_body(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session,
        "object": "relay.session",
        "recordings": [dataclasses.asdict(recording) for recording in info.recordings],
        "num_blocks": info.num_blocks,
        "num_bytes": info.num_bytes,
        "last_used": info.last_used,
    }
