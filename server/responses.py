"""What clients get: the wire types of answers and chunks. Only fields that were set are sent."""

from __future__ import annotations

import secrets

from pydantic import BaseModel

from relaykv.engine.relay_report import PromptRun, RelayReport, RunKind
from relaykv.engine.request import FinishReason, Usage
from relaykv.server.tool_calls import ToolCall

# JSON allows these in a string, but some clients end a line of the event stream at them.
_LINE_SEPARATORS = (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085"))


class TopLogprob(BaseModel):
    """A token, its bytes and its log-probability (natural logarithm)."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprobBody(TopLogprob):
    """A chosen token with the likeliest alternatives at its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens."""

    content: list[TokenLogprobBody]
    refusal: None


class PromptTokensDetails(BaseModel):
    """`cached_tokens` counts what was not computed again: exact prefix hits and relayed KV."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Kept for clients that add it up."""

    reasoning_tokens: int


class UsageBody(BaseModel):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RelayTokens(BaseModel):
    """Prompt tokens by kind; they add up to the prompt's length."""

    prefix: int
    relayed: int
    recomputed: int
    computed: int


class RelaySegmentBody(BaseModel):
    """One run of the prompt (half-open token ranges) that a recording holds.

    `policy` served it ("full": it was computed); `why` says so where there was a choice.
    """

    start: int
    stop: int
    source_request_id: str
    source_start: int
    recomputed_tokens: int
    policy: str
    why: str | None = None


class RunSourceBody(BaseModel):
    """Where the first token of a run stood in the recording that was read."""

    request_id: str
    start: int


class PromptRunBody(BaseModel):
    """A half-open range of the prompt's tokens to which the same happened."""

    kind: RunKind
    start: int
    stop: int
    source: RunSourceBody | None = None  # of `relayed` and `recomputed` runs only


class RelayResult(BaseModel):
    """The `relay` object of an answer."""

    policy: str
    session: str | None
    tokens: RelayTokens
    recomputed_share: float
    reason: str | None
    segments: list[RelaySegmentBody] = []  # sent when the request asked to explain
    runs: list[PromptRunBody] = []  # likewise; they cover the prompt once, in order


class CalledFunctionBody(BaseModel):
    """The function of a call; `arguments` is JSON text. A stream tells it in parts."""

    name: str = ""
    arguments: str


class ToolCallBody(BaseModel):
    """A call that the answer asks for."""

    id: str
    type: str
    function: CalledFunctionBody


class ToolCallDelta(BaseModel):
    """A part of a call: id, type and name first, then arguments."""

    index: int
    id: str = ""
    type: str = ""
    function: CalledFunctionBody


class AnswerMessage(BaseModel):
    """The message of a choice."""

    role: str
    content: str | None  # null when there are calls and nothing else
    refusal: None
    tool_calls: list[ToolCallBody] = []  # absent when there are none


class Choice(BaseModel):
    """One answer of several."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: str = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChunkChoice(BaseModel):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None


class ChatCompletion(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    system_fingerprint: str
    relay: RelayResult | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: UsageBody | None = None
    relay: RelayResult | None = None


def wire_json(body: BaseModel) -> str:
    """The JSON text of a response, on one line for every kind of reader."""
    text = body.model_dump_json(exclude_unset=True)
    if not text.isascii():
        for character, escape in _LINE_SEPARATORS:
            text = text.replace(character, escape)
    return text


def usage_body(usage: Usage, num_completion_tokens: int) -> UsageBody:
    """Counts of an answer whose choices share the prompt, which counts once."""
    return UsageBody(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
    )


def relay_result(report: RelayReport, explain: bool) -> RelayResult:
    """The `relay` object of a report, with its segments and runs when asked to explain."""
    result = RelayResult(
        policy=report.policy,
        session=report.session,
        tokens=RelayTokens(
            prefix=report.num_prefix_tokens,
            relayed=report.num_relayed_tokens,
            recomputed=report.num_recomputed_tokens,
            computed=report.num_computed_tokens,
        ),
        recomputed_share=report.recomputed_share,
        reason=report.reason,
    )
    if explain:
        result.segments = [
            RelaySegmentBody(
                start=segment.start,
                stop=segment.stop,
                source_request_id=segment.source_request_id,
                source_start=segment.source_start,
                recomputed_tokens=segment.num_recomputed_tokens,
                policy=segment.policy,
                why=segment.why,
            )
            for segment in report.segments
        ]
        result.runs = [_run_body(run) for run in report.runs]
    return result


def _run_body(run: PromptRun) -> PromptRunBody:
    if run.source is None:
        return PromptRunBody(kind=run.kind, start=run.start, stop=run.stop)
    source = RunSourceBody(request_id=run.source.request_id, start=run.source.start)
    return PromptRunBody(kind=run.kind, start=run.start, stop=run.stop, source=source)


def tool_call_body(call: ToolCall) -> ToolCallBody:
    """A call with an id of its own."""
    function = CalledFunctionBody(name=call.name, arguments=call.arguments)
    return ToolCallBody(id=f"call_{secrets.token_hex(12)}", type="function", function=function)


def tool_call_deltas(index: int, call: ToolCallBody) -> tuple[ToolCallDelta, ToolCallDelta]:
    """A call in the two parts that a stream tells it in."""
    name = CalledFunctionBody(name=call.function.name, arguments="")
    start = ToolCallDelta(index=index, id=call.id, type=call.type, function=name)
    arguments = CalledFunctionBody(arguments=call.function.arguments)
    return start, ToolCallDelta(index=index, function=arguments)


def finish_reason_text(reason: FinishReason) -> str:
    """OpenAI's word for a regular end.

    Raises:
        ValueError: the request did not end regularly.
    """
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason.value
    raise ValueError(f"a request that ended with {reason.value} has no answer")


def chat_finish_reason(reason: str, has_calls: bool) -> str:
    """What a chat answer says of its end: one that calls tools ends with `tool_calls`."""
    return "tool_calls" if reason == "stop" and has_calls else reason
