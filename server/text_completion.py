"""The answers of /v1/completions, plain and streamed."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from relaykv.engine.client import EngineClient
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from relaykv.server.chat import AnswerPlan, finite
from relaykv.server.choices import ChoiceOutputs, finished_choices
from relaykv.server.event_stream import DONE, guarded_events, outputs_or_silence
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.responses import (
    RelayResult,
    UsageBody,
    finish_reason_text,
    relay_result,
    usage_body,
    wire_json,
)


class TextLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens, in four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: nothing predicts the first token of a prompt
    top_logprobs: list[dict[str, float] | None]  # the chosen token is always among them
    text_offset: list[int]  # characters of the choice's text in front of the token


class TextChoice(BaseModel):
    """One answer of several, or what a chunk adds to it."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None
    relay: RelayResult | None = None  # sent when there are several prompts


class TextCompletion(BaseModel):
    """Answer of POST /v1/completions, and every event of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: UsageBody | None = None
    relay: RelayResult | None = None  # of the first prompt


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What is fixed about a text completion before its first token."""

    answer: AnswerPlan
    choices_per_prompt: int
    echoes: tuple[str, ...]  # by prompt: what its answers start with

    def echo(self, index: int) -> str:
        """What the choice's text starts with."""
        return self.echoes[index // self.choices_per_prompt]

    def num_tokens(self, usages: Sequence[Usage]) -> UsageBody:
        """Counts over all choices; choices of the same prompt count it once."""
        firsts = usages[:: self.choices_per_prompt]
        num_output_tokens = sum(usage.num_output_tokens for usage in usages)
        total = Usage(
            num_prompt_tokens=sum(usage.num_prompt_tokens for usage in firsts),
            num_output_tokens=num_output_tokens,
            num_cached_tokens=sum(usage.num_cached_tokens for usage in firsts),
        )
        return usage_body(total, num_output_tokens)


async def complete_text(
    plan: TextPlan, engine: EngineClient, tokenizer: ServerTokenizer
) -> TextCompletion:
    """Generates every choice to its end.

    Raises:
        ApiError: a choice failed.
        EngineDeadError: the engine has ended.
    """
    choices = await finished_choices(engine, plan.answer.requests)
    bodies = []
    for index, choice in enumerate(choices):
        logprobs = None
        request = plan.answer.requests[index]
        if request.sampling.num_logprobs is not None:
            writer = _LogprobWriter(tokenizer)
            logprobs = writer.write(choice.logprobs, _echoed(request, choice.prompt_logprobs))
        text = plan.echo(index) + choice.text
        body = TextChoice(
            text=text, index=index, logprobs=logprobs, finish_reason=choice.finish_reason
        )
        bodies.append(_with_relay(body, plan, choice.relay))
    completion = _completion(plan, bodies)
    completion.usage = plan.num_tokens([choice.usage for choice in choices])
    _set_relay(completion, plan, choices[0].relay)
    return completion


def stream_text(
    plan: TextPlan, engine: EngineClient, tokenizer: ServerTokenizer, keepalive_s: float
) -> AsyncGenerator[str, None]:
    """Yields the events of an answer; a failure is the last event, without `[DONE]`."""

    async def events() -> AsyncGenerator[str | None, None]:
        writer = _ChunkWriter(plan, tokenizer)
        async with ChoiceOutputs(engine, plan.answer.requests) as outputs:
            async for item in outputs_or_silence(outputs, keepalive_s):
                chunk = None if item is None else writer.chunk(*item)
                if item is None or chunk is not None:
                    yield None if chunk is None else _data(chunk)
        if plan.answer.include_usage:
            yield _data(writer.usage_chunk())
        yield DONE

    return guarded_events(events())


class _ChunkWriter:
    """Makes the chunks of one answer."""

    def __init__(self, plan: TextPlan, tokenizer: ServerTokenizer) -> None:
        self._plan = plan
        self._logprobs = [_LogprobWriter(tokenizer) for _ in plan.answer.requests]
        self._usages: dict[int, Usage] = {}
        self._reports: dict[int, RelayReport] = {}

    def chunk(self, index: int, output: RequestOutput) -> TextCompletion | None:
        """What the output adds to its choice; None when that is nothing."""
        text, echoed = output.text, _NOTHING
        if index not in self._usages:
            text = self._plan.echo(index) + text
            echoed = _echoed(self._plan.answer.requests[index], output.prompt_logprobs)
        self._usages[index] = output.usage
        if output.relay is not None:
            self._reports[index] = output.relay
        logprobs = None
        if output.logprobs or echoed.token_id is not None:
            logprobs = self._logprobs[index].write(output.logprobs, echoed)
        reason = _reason(output.finish_reason)
        if not text and logprobs is None and reason is None:
            return None
        choice = TextChoice(text=text, index=index, logprobs=logprobs, finish_reason=reason)
        report = self._reports.get(index) if reason is not None else None
        chunk = _completion(self._plan, [_with_relay(choice, self._plan, report)])
        if self._plan.answer.include_usage:
            chunk.usage = None  # OpenAI sends a null in every chunk but the last then
        if index == 0:
            _set_relay(chunk, self._plan, report)
        return chunk

    def usage_chunk(self) -> TextCompletion:
        """The token counts of all choices."""
        chunk = _completion(self._plan, [])
        chunk.usage = self._plan.num_tokens([self._usages[i] for i in sorted(self._usages)])
        _set_relay(chunk, self._plan, self._reports.get(0))
        return chunk


@dataclass(frozen=True, slots=True)
class _Echoed:
    """The tokens of a prompt that is echoed with log-probabilities."""

    token_id: int | None = None  # the first; None: nothing is echoed with them
    rest: tuple[TokenLogprob, ...] = ()


_NOTHING = _Echoed()


def _echoed(request: GenerateRequest, logprobs: tuple[TokenLogprob, ...]) -> _Echoed:
    if request.sampling.num_prompt_logprobs is None:
        return _NOTHING
    return _Echoed(request.prompt_token_ids[0], logprobs)


class _LogprobWriter:
    """Log-probabilities of one choice, in pieces; keeps where in the text it is."""

    def __init__(self, tokenizer: ServerTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, logprobs: Sequence[TokenLogprob], echoed: _Echoed) -> TextLogprobs:
        """The next tokens; those of the echoed prompt stand in front."""
        body = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if echoed.token_id is not None:
            self._place(body, echoed.token_id)
            body.token_logprobs.append(None)
            body.top_logprobs.append(None)
        for entry in (*echoed.rest, *logprobs):
            self._place(body, entry.token_id)
            body.token_logprobs.append(finite(entry.logprob))
            top = (*entry.top, (entry.token_id, entry.logprob))
            likeliest = {self._token(token): finite(logprob) for token, logprob in top}
            body.top_logprobs.append(likeliest)
        return body

    def _place(self, body: TextLogprobs, token_id: int) -> None:
        body.tokens.append(self._token(token_id))
        body.text_offset.append(self._offset)
        if self._tokenizer.decode((token_id,)):  # "" for a control token
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def _token(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:  # OpenAI's spelling of a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _completion(plan: TextPlan, choices: list[TextChoice]) -> TextCompletion:
    return TextCompletion(
        id=plan.answer.completion_id,
        object="text_completion",
        created=plan.answer.created,
        model=plan.answer.model,
        choices=choices,
        system_fingerprint=plan.answer.system_fingerprint,
    )


def _with_relay(choice: TextChoice, plan: TextPlan, report: RelayReport | None) -> TextChoice:
    has_session = plan.answer.requests[0].relay.session is not None
    if has_session and report is not None and len(plan.echoes) > 1:
        choice.relay = relay_result(report, plan.answer.explain)
    return choice


def _set_relay(completion: TextCompletion, plan: TextPlan, report: RelayReport | None) -> None:
    if plan.answer.requests[0].relay.session is not None and report is not None:
        completion.relay = relay_result(report, plan.answer.explain)


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else finish_reason_text(reason)


def _data(chunk: TextCompletion) -> str:
    return f"data: {wire_json(chunk)}\n\n"
