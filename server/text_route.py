"""POST /v1/completions, streamed and plain."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from relaykv.engine.client import ModelCard
from relaykv.server.body import read_model
from relaykv.server.chat import check_model, check_token_ids, plan_answer
from relaykv.server.disconnect import until_disconnect
from relaykv.server.event_stream import EventStreamResponse
from relaykv.server.prompt import PromptBuilder
from relaykv.server.responses import wire_json
from relaykv.server.session import session_of, tenant_of
from relaykv.server.state import state_of
from relaykv.server.text_completion import TextPlan, complete_text, stream_text
from relaykv.server.text_protocol import Prompt, TextCompletionRequest


async def create_text_completion(request: Request) -> Response:
    """Continues texts. Everything is validated before the first header leaves."""
    state = state_of(request)
    backend = state.backend()
    body = await read_model(request, TextCompletionRequest, state.settings.max_body_bytes)
    engine, tokenizer = backend.engine, backend.prompts.tokenizer
    check_model(body.model, engine.model)
    session = session_of(request, body.relay_session, body.metadata)
    prompts = [await _ids(prompt, backend.prompts, engine.model) for prompt in body.prompt]
    answer = plan_answer(
        body,
        prompts,
        engine,
        session=session,
        tenant=tenant_of(request),
        version=state.settings.version,
        id_prefix="cmpl-",
        prompt_param="prompt",
    )
    echoes = [await _text(prompt, backend.prompts) if body.echo else "" for prompt in body.prompt]
    plan = TextPlan(answer, body.num_choices, tuple(echoes))
    if body.stream:
        keepalive_s = state.settings.keepalive_s
        return EventStreamResponse(stream_text(plan, engine, tokenizer, keepalive_s))
    work = complete_text(plan, engine, tokenizer)
    completion = await until_disconnect(request.receive, work)
    return Response(wire_json(completion), media_type="application/json")


async def _ids(prompt: Prompt, prompts: PromptBuilder, card: ModelCard) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await prompts.from_document(prompt)
    check_token_ids(prompt, card, "prompt")
    return prompt


async def _text(prompt: Prompt, prompts: PromptBuilder) -> str:
    return prompt if isinstance(prompt, str) else await prompts.to_text(prompt)
