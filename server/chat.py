"""A validated chat body to what the engine is asked, and what the engine says to wire values."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.client import EngineClient, ModelCard
from relaykv.engine.policy_name import parse_policy_name
from relaykv.engine.request import (
    GenerateRequest,
    GrammarSpec,
    RelayOptions,
    SamplingParams,
    TokenLogprob,
)
from relaykv.server.errors import ApiError, bad_request, context_overflow
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.protocol import GenerationRequest
from relaykv.server.responses import ChoiceLogprobs, TokenLogprobBody, TopLogprob
from relaykv.server.tool_calls import AnswerParser, answer_parser
from relaykv.server.tool_form import ToolForm
from relaykv.server.tools import ToolUse


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Everything that is fixed about an answer before its first token."""

    completion_id: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str
    requests: tuple[GenerateRequest, ...]  # one per choice; a prompt's choices follow each other
    include_usage: bool  # in a stream
    explain: bool  # list the relayed segments and the prompt's runs
    tools: ToolUse | None = None  # that the answer may call
    tool_form: ToolForm = ToolForm.GENERIC

    def parser(self) -> AnswerParser:
        """What splits one choice into text and calls."""
        return answer_parser(self.tools, self.tool_form)


def model_names(card: ModelCard) -> tuple[str, ...]:
    """Names the model is listed under: its own, and one without a slash when that has one.

    Some clients take a slash in a model's name for the name of a provider.
    """
    alias = card.name.rstrip("/").rpartition("/")[2]
    return (card.name,) if alias in ("", card.name) else (card.name, alias)


def check_model(name: str | None, card: ModelCard) -> None:
    """Accepts the listed names, also behind `openai/`, and null for the one that is served.

    Raises:
        ApiError: 404 with code `model_not_found`.
    """
    names = model_names(card)
    if name is None or name in names or name.removeprefix("openai/") in names:
        return
    served = " or ".join(f"'{known}'" for known in names)
    message = f"The model '{name}' does not exist; this server has {served}."
    raise ApiError(404, message, param="model", code="model_not_found")


def plan_answer(
    body: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    engine: EngineClient,
    *,
    session: str | None,
    tenant: str,
    version: str,
    grammar: GrammarSpec | None = None,
    id_prefix: str = "chatcmpl-",
    prompt_param: str = "messages",
    agent_class: str = "",
    question: str = "",
) -> AnswerPlan:
    """Puts a body's wishes into the engine's values, one request per prompt and choice.

    Args:
        agent_class: names the kind of agent that asks; "" leaves telling it to the engine.
        question: names what it is asked; "" is like no other.

    Raises:
        ApiError: 400 for an unknown policy or token id and for a prompt that fills the context.
    """
    relay = relay_options(body, session, engine.policies)
    relay = dataclasses.replace(relay, agent_class=agent_class, question=question)
    completion_id = f"{id_prefix}{secrets.token_hex(12)}"
    wanted = []
    for prompt in prompts:
        sampling = sampling_params(body, len(prompt), engine.model, prompt_param)
        sampling = dataclasses.replace(sampling, grammar=grammar)
        wanted += [(prompt, _for_choice(sampling, index)) for index in range(body.num_choices)]
    requests = tuple(
        GenerateRequest(
            request_id=completion_id if len(wanted) == 1 else f"{completion_id}-{index}",
            prompt_token_ids=prompt,
            sampling=sampling,
            relay=relay,
            tenant=tenant,
        )
        for index, (prompt, sampling) in enumerate(wanted)
    )
    options = body.stream_options
    return AnswerPlan(
        completion_id=completion_id,
        created=int(time.time()),
        model=engine.model.name,
        system_fingerprint=f"relaykv-{version}",
        requests=requests,
        include_usage=bool(options and options.include_usage),
        explain=relay.explain,
    )


def sampling_params(
    body: GenerationRequest, num_prompt_tokens: int, card: ModelCard, prompt_param: str
) -> SamplingParams:
    """How to sample. A limit beyond the room left in the context is cut to that room.

    Raises:
        ApiError: 400 for a prompt that fills the context or a token id the model does not have.
    """
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise context_overflow(num_prompt_tokens, card.max_model_len, prompt_param)
    if num_prompt_tokens < 1:
        raise bad_request(f"'{prompt_param}' gives an empty prompt.", param=prompt_param)
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_token_ids(tuple(body.logit_bias), card, "logit_bias")
    check_token_ids(stop_token_ids, card, "stop_token_ids")
    wanted = body.wanted_tokens
    return SamplingParams(
        max_tokens=room if wanted is None else min(wanted, room),
        temperature=_or_default(body.temperature, 1.0),
        top_p=_or_default(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or_default(body.min_p, 0.0),
        seed=body.seed,
        frequency_penalty=_or_default(body.frequency_penalty, 0.0),
        presence_penalty=_or_default(body.presence_penalty, 0.0),
        repetition_penalty=_or_default(body.repetition_penalty, 1.0),
        logit_bias=tuple(body.logit_bias.items()),
        stop=body.stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
    )


def check_token_ids(ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Refuses ids that the model does not have.

    Raises:
        ApiError: 400 naming `param`.
    """
    for token_id in ids:
        if token_id >= card.vocab_size:
            size = card.vocab_size
            message = f"Invalid '{param}': the vocabulary has {size} tokens, {token_id} is no id."
            raise bad_request(message, param=param)


def relay_options(
    body: GenerationRequest, session: str | None, policies: Sequence[str]
) -> RelayOptions:
    """What the request wants of relaying.

    Raises:
        ApiError: 400 for a policy the engine does not know.
    """
    relay = body.relay
    if relay is None:
        return RelayOptions(session=session)
    if relay.policy is not None:
        try:
            parse_policy_name(relay.policy, policies)
        except ValueError as error:
            message = f"Invalid 'relay.policy': {error}."
            raise bad_request(message, param="relay.policy") from error
    return RelayOptions(
        session=session,
        policy=relay.policy,
        store=relay.store is not False,
        explain=bool(relay.explain),
    )


def choice_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: ServerTokenizer) -> ChoiceLogprobs:
    """Log-probabilities in OpenAI's form.

    A token's text may hold U+FFFD where it is part of a character; its bytes are exact.
    """

    def entry(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=tokenizer.decode((token_id,), skip_special_tokens=False),
            bytes=list(tokenizer.token_bytes(token_id)),
            logprob=finite(logprob),
        )

    content = []
    for chosen in logprobs:
        own = entry(chosen.token_id, chosen.logprob)
        top = [entry(token_id, logprob) for token_id, logprob in chosen.top]
        content.append(TokenLogprobBody(**own.model_dump(), top_logprobs=top))
    return ChoiceLogprobs(content=content, refusal=None)


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.seed is None or index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + index)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def finite(logprob: float) -> float:
    """A log-probability that JSON can spell."""
    # JSON has no infinity; OpenAI writes this for "practically impossible".
    return max(logprob, -9999.0)
