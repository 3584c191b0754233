"""POST /v1/chat/completions, streamed and plain."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from relaykv.server.body import read_model
from relaykv.server.chat import check_model, plan_chat
from relaykv.server.completion import complete_chat
from relaykv.server.disconnect import until_disconnect
from relaykv.server.protocol import ChatCompletionRequest
from relaykv.server.responses import wire_json
from relaykv.server.session import session_of, tenant_of
from relaykv.server.state import state_of
from relaykv.server.streaming import EventStreamResponse, stream_chat


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation. Everything is validated before the first header leaves."""
    state = state_of(request)
    backend = state.backend()
    body = await read_model(request, ChatCompletionRequest, state.settings.max_body_bytes)
    engine, tokenizer = backend.engine, backend.prompts.tokenizer
    check_model(body.model, engine.model)
    session = session_of(request, body.relay_session, body.metadata)
    prompt = await backend.prompts.from_messages(body.messages)
    plan = plan_chat(
        body,
        prompt,
        engine,
        session=session,
        tenant=tenant_of(request),
        version=state.settings.version,
    )
    if body.stream:
        keepalive_s = state.settings.keepalive_s
        return EventStreamResponse(stream_chat(plan, engine, tokenizer, keepalive_s))
    work = complete_chat(plan, engine, tokenizer)
    completion = await until_disconnect(request.receive, work)
    return Response(wire_json(completion), media_type="application/json")
