"""A plain (not streamed) chat completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from relaykv.engine.client import EngineClient
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import RequestOutput, TokenLogprob, Usage
from relaykv.server.chat import ChatPlan, choice_logprobs
from relaykv.server.choices import ChoiceOutputs
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.responses import (
    AnswerMessage,
    ChatCompletion,
    Choice,
    finish_reason_text,
    relay_result,
    usage_body,
)


@dataclass(slots=True)
class _ChoiceSoFar:
    """What a choice has produced; one for each, filled by `complete_chat` alone."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: RequestOutput | None = None
    relay: RelayReport | None = None


async def complete_chat(
    plan: ChatPlan, engine: EngineClient, tokenizer: ServerTokenizer
) -> ChatCompletion:
    """Generates every choice to its end.

    Raises:
        ApiError: a choice failed.
        EngineDeadError: the engine has ended.
    """
    choices = [_ChoiceSoFar() for _ in plan.requests]
    async with ChoiceOutputs(engine, plan.requests) as outputs:
        while (item := await outputs.next()) is not None:
            index, output = item
            choice = choices[index]
            choice.texts.append(output.text)
            choice.logprobs.extend(output.logprobs)
            choice.last = output
            choice.relay = output.relay or choice.relay
    usages = [_last_output(choice).usage for choice in choices]
    completion = ChatCompletion(
        id=plan.completion_id,
        object="chat.completion",
        created=plan.created,
        model=plan.model,
        choices=[_choice(index, choice, plan, tokenizer) for index, choice in enumerate(choices)],
        usage=usage_body(usages[0], _num_output_tokens(usages)),
        system_fingerprint=plan.system_fingerprint,
    )
    report = choices[0].relay
    if plan.requests[0].relay.session is not None and report is not None:
        completion.relay = relay_result(report, plan.explain)
    return completion


def _choice(index: int, choice: _ChoiceSoFar, plan: ChatPlan, tokenizer: ServerTokenizer) -> Choice:
    reason = _last_output(choice).finish_reason
    assert reason is not None
    wants_logprobs = plan.requests[index].sampling.num_logprobs is not None
    return Choice(
        index=index,
        message=AnswerMessage(role="assistant", content="".join(choice.texts), refusal=None),
        logprobs=choice_logprobs(choice.logprobs, tokenizer) if wants_logprobs else None,
        finish_reason=finish_reason_text(reason),
    )


def _last_output(choice: _ChoiceSoFar) -> RequestOutput:
    assert choice.last is not None
    return choice.last


def _num_output_tokens(usages: list[Usage]) -> int:
    return sum(usage.num_output_tokens for usage in usages)
