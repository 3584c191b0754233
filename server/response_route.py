"""/v1/responses: answers as a translation of chat completions, and the answers that are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from relaykv.server.body import read_model
from relaykv.server.chat import check_model
from relaykv.server.chat_route import plan_chat
from relaykv.server.completion import complete_chat
from relaykv.server.disconnect import until_disconnect
from relaykv.server.errors import ApiError, bad_request
from relaykv.server.event_stream import EventStreamResponse
from relaykv.server.protocol import ChatMessage
from relaykv.server.response_body import ResponseBody, completed_response
from relaykv.server.response_events import stream_response
from relaykv.server.response_items import messages_of_input
from relaykv.server.response_protocol import ResponseRequest, renamed
from relaykv.server.response_store import ResponseStore, StoredResponse
from relaykv.server.responses import wire_json
from relaykv.server.session import tenant_of
from relaykv.server.state import state_of
from relaykv.server.streaming import chat_chunks


async def create_response(request: Request) -> Response:
    """Answers an input. Everything is validated before the first header leaves."""
    state = state_of(request)
    backend = state.backend()
    body = await read_model(request, ResponseRequest, state.settings.max_body_bytes)
    engine, tokenizer = backend.engine, backend.prompts.tokenizer
    check_model(body.model, engine.model)
    tenant = tenant_of(request)
    turns = _conversation(body, tenant, state.responses)
    instructions = body.instructions
    system = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    try:
        plan = await plan_chat(request, body.chat_request([*system, *turns]), "resp_", "input")
    except ApiError as error:
        raise renamed(error) from error

    def keep(response: ResponseBody) -> None:
        if body.store is not False:
            state.responses.put(tenant, _stored(response, turns))

    if body.stream:
        chunks = chat_chunks(plan, engine, tokenizer, state.settings.keepalive_s)
        return EventStreamResponse(stream_response(body, plan, chunks, keep))
    work = complete_chat(plan, engine, tokenizer)
    completion = await until_disconnect(request.receive, work)
    response = completed_response(body, plan, completion)
    keep(response)
    return Response(wire_json(response), media_type="application/json")


async def show_response(request: Request, response_id: str) -> Response:
    """A response that the caller's API key had before."""
    stored = state_of(request).responses.get(tenant_of(request), response_id)
    if stored is None:
        raise _no_response(response_id)
    return Response(stored.body, media_type="application/json")


async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a response; those that built on it keep what they need."""
    if not state_of(request).responses.delete(tenant_of(request), response_id):
        raise _no_response(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _conversation(body: ResponseRequest, tenant: str, store: ResponseStore) -> list[ChatMessage]:
    """Earlier turns and the new ones, without instructions."""
    earlier: tuple[ChatMessage, ...] = ()
    if body.previous_response_id:
        stored = store.get(tenant, body.previous_response_id)
        if stored is None:
            message = f"Previous response with id '{body.previous_response_id}' not found."
            code = "previous_response_not_found"
            raise bad_request(message, param="previous_response_id", code=code)
        earlier = stored.messages
    turns = [*earlier, *messages_of_input(body.input, partial(store.find_item, tenant))]
    if not turns:
        message = "Invalid 'input': expected at least one item."
        raise bad_request(message, param="input", code="empty_array")
    return turns


def _stored(response: ResponseBody, turns: list[ChatMessage]) -> StoredResponse:
    text = wire_json(response)
    output: list[Mapping[str, Any]] = json.loads(text)["output"]
    answer = messages_of_input(output, lambda _: None)
    items = {item["id"]: item for item in output}
    return StoredResponse(response.id, text, (*turns, *answer), items)


def _no_response(response_id: str) -> ApiError:
    message = f"Response with id '{response_id}' not found."
    return ApiError(404, message, param="response_id", code="response_not_found")
