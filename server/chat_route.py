"""POST /v1/chat/completions, streamed and plain."""

from __future__ import annotations

import asyncio
import dataclasses

from fastapi import Request
from fastapi.responses import Response

from relaykv.server.agent import agent_class, question
from relaykv.server.body import read_model
from relaykv.server.chat import AnswerPlan, check_model, plan_answer
from relaykv.server.completion import complete_chat
from relaykv.server.disconnect import until_disconnect
from relaykv.server.event_stream import EventStreamResponse
from relaykv.server.output_grammar import output_grammar, read_response_format
from relaykv.server.protocol import ChatCompletionRequest
from relaykv.server.responses import wire_json
from relaykv.server.session import session_of, tenant_of
from relaykv.server.state import state_of
from relaykv.server.streaming import stream_chat
from relaykv.server.tools import read_tool_use


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation. Everything is validated before the first header leaves."""
    state = state_of(request)
    backend = state.backend()
    body = await read_model(request, ChatCompletionRequest, state.settings.max_body_bytes)
    engine, tokenizer = backend.engine, backend.prompts.tokenizer
    plan = await plan_chat(request, body)
    if body.stream:
        keepalive_s = state.settings.keepalive_s
        return EventStreamResponse(stream_chat(plan, engine, tokenizer, keepalive_s))
    work = complete_chat(plan, engine, tokenizer)
    completion = await until_disconnect(request.receive, work)
    return Response(wire_json(completion), media_type="application/json")


async def plan_chat(
    request: Request,
    body: ChatCompletionRequest,
    id_prefix: str = "chatcmpl-",
    prompt_param: str = "messages",
) -> AnswerPlan:
    """Renders a conversation and fixes everything about its answer.

    Raises:
        ApiError: the model has another name, or the conversation cannot be served.
    """
    state = state_of(request)
    backend = state.backend()
    check_model(body.model, backend.engine.model)
    session = session_of(request, body.relay_session, body.metadata)
    prompts = backend.prompts
    schema = read_response_format(body.response_format)
    tools = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = prompts.tool_form
    # Not in the prompts' threads: an intricate schema may take seconds.
    grammar = await asyncio.to_thread(output_grammar, schema, tools, form)
    definitions = tools.definitions if tools else ()
    prompt = await prompts.from_messages(body.messages, definitions)
    plan = plan_answer(
        body,
        (prompt,),
        backend.engine,
        session=session,
        tenant=tenant_of(request),
        version=state.settings.version,
        grammar=grammar,
        id_prefix=id_prefix,
        prompt_param=prompt_param,
        agent_class=agent_class(body.messages, definitions),
        question=question(body.messages),
    )
    return dataclasses.replace(plan, tools=tools, tool_form=form)
