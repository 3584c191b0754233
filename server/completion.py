"""A plain (not streamed) chat completion."""

from __future__ import annotations

from relaykv.engine.client import EngineClient
from relaykv.server.chat import AnswerPlan, choice_logprobs
from relaykv.server.choices import FinishedChoice, finished_choices
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.responses import (
    AnswerMessage,
    ChatCompletion,
    Choice,
    chat_finish_reason,
    relay_result,
    tool_call_body,
    usage_body,
)
from relaykv.server.tool_calls import ToolCall


async def complete_chat(
    plan: AnswerPlan, engine: EngineClient, tokenizer: ServerTokenizer
) -> ChatCompletion:
    """Generates every choice to its end.

    Raises:
        ApiError: a choice failed.
        EngineDeadError: the engine has ended.
    """
    choices = await finished_choices(engine, plan.requests)
    completion = ChatCompletion(
        id=plan.completion_id,
        object="chat.completion",
        created=plan.created,
        model=plan.model,
        choices=[_choice(index, choice, plan, tokenizer) for index, choice in enumerate(choices)],
        usage=usage_body(
            choices[0].usage, sum(choice.usage.num_output_tokens for choice in choices)
        ),
        system_fingerprint=plan.system_fingerprint,
    )
    report = choices[0].relay
    if plan.requests[0].relay.session is not None and report is not None:
        completion.relay = relay_result(report, plan.explain)
    return completion


def _choice(
    index: int, choice: FinishedChoice, plan: AnswerPlan, tokenizer: ServerTokenizer
) -> Choice:
    wants_logprobs = plan.requests[index].sampling.num_logprobs is not None
    parser = plan.parser()
    pieces = parser.push(choice.text)
    pieces += parser.finish(is_cut=choice.finish_reason == "length")
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = [tool_call_body(piece) for piece in pieces if isinstance(piece, ToolCall)]
    message = AnswerMessage(role="assistant", content=text, refusal=None)
    if calls:
        message.tool_calls = calls
        message.content = text or None
    return Choice(
        index=index,
        message=message,
        logprobs=choice_logprobs(choice.logprobs, tokenizer) if wants_logprobs else None,
        finish_reason=chat_finish_reason(choice.finish_reason, bool(calls)),
    )
