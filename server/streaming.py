"""A streamed chat completion: the engine's outputs as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from relaykv.engine.client import EngineClient
from relaykv.engine.request import FinishReason, RequestOutput
from relaykv.server.chat import AnswerPlan, choice_logprobs
from relaykv.server.choices import ChoiceOutputs
from relaykv.server.event_stream import DONE, guarded_events, outputs_or_silence
from relaykv.server.prompt import ServerTokenizer
from relaykv.server.responses import (
    ChatCompletionChunk,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    RelayResult,
    chat_finish_reason,
    finish_reason_text,
    relay_result,
    tool_call_body,
    tool_call_deltas,
    usage_body,
    wire_json,
)
from relaykv.server.tool_calls import AnswerParser, Piece


def stream_chat(
    plan: AnswerPlan, engine: EngineClient, tokenizer: ServerTokenizer, keepalive_s: float
) -> AsyncGenerator[str, None]:
    """Yields the events of an answer; a failure is the last event, without `[DONE]`."""

    async def events() -> AsyncGenerator[str | None, None]:
        async with aclosing(chat_chunks(plan, engine, tokenizer, keepalive_s)) as chunks:
            async for chunk in chunks:
                yield None if chunk is None else _data(chunk)
        yield DONE

    return guarded_events(events())


async def chat_chunks(
    plan: AnswerPlan, engine: EngineClient, tokenizer: ServerTokenizer, keepalive_s: float
) -> AsyncGenerator[ChatCompletionChunk | None, None]:
    """The chunks of an answer; None after every `keepalive_s` of silence.

    Raises:
        ApiError: 500, a choice failed.
        EngineDeadError: the engine has ended.
    """
    writer = _ChunkWriter(plan, tokenizer)
    async with ChoiceOutputs(engine, plan.requests) as outputs:
        async for item in outputs_or_silence(outputs, keepalive_s):
            if item is None:
                yield None
                continue
            for chunk in writer.chunks(*item):
                yield chunk
    if plan.include_usage:
        yield writer.usage_chunk()


class _ChunkWriter:
    """Makes the chunks of one answer."""

    def __init__(self, plan: AnswerPlan, tokenizer: ServerTokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._last: dict[int, RequestOutput] = {}
        self._relay: dict[int, RelayResult] = {}
        self._parsers: dict[int, AnswerParser] = {}
        self._num_calls: dict[int, int] = {}

    def chunks(self, index: int, output: RequestOutput) -> list[ChatCompletionChunk]:
        """The role once, the new text and calls if there are any, the end with its reason."""
        chunks = []
        if index not in self._last:
            chunks.append(self._chunk(index, Delta(role="assistant", content="")))
            self._parsers[index] = self._plan.parser()
            self._num_calls[index] = 0
        self._last[index] = output
        if output.relay is not None and self._plan.requests[index].relay.session is not None:
            self._relay[index] = relay_result(output.relay, self._plan.explain)
        chunks += self._content_chunks(index, output)
        if output.finish_reason is not None:
            reason = finish_reason_text(output.finish_reason)
            reason = chat_finish_reason(reason, self._num_calls[index] > 0)
            chunks.append(self._with_relay(self._chunk(index, Delta(), reason=reason), index))
        return chunks

    def _content_chunks(self, index: int, output: RequestOutput) -> list[ChatCompletionChunk]:
        parser = self._parsers[index]
        pieces = parser.push(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish(is_cut=output.finish_reason is FinishReason.LENGTH)
        deltas = [delta for piece in pieces for delta in self._deltas(index, piece)]
        logprobs = choice_logprobs(output.logprobs, self._tokenizer) if output.logprobs else None
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        return [
            self._chunk(index, delta, logprobs=None if number else logprobs)
            for number, delta in enumerate(deltas)
        ]

    def _deltas(self, index: int, piece: Piece) -> list[Delta]:
        if isinstance(piece, str):
            return [Delta(content=piece)]
        number = self._num_calls[index]
        self._num_calls[index] += 1
        parts = tool_call_deltas(number, tool_call_body(piece))
        return [Delta(tool_calls=[part]) for part in parts]

    def usage_chunk(self) -> ChatCompletionChunk:
        """The token counts of all choices, whose prompt counts once."""
        num_output_tokens = sum(output.usage.num_output_tokens for output in self._last.values())
        chunk = self._empty_chunk([])
        chunk.usage = usage_body(self._last[0].usage, num_output_tokens)
        return self._with_relay(chunk, 0)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChoiceLogprobs | None = None,
        reason: str | None = None,
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        chunk = self._empty_chunk([choice])
        if self._plan.include_usage:
            chunk.usage = None  # OpenAI sends a null in every chunk but the last then
        return chunk

    def _empty_chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._plan.completion_id,
            object="chat.completion.chunk",
            created=self._plan.created,
            model=self._plan.model,
            choices=choices,
            system_fingerprint=self._plan.system_fingerprint,
        )

    def _with_relay(self, chunk: ChatCompletionChunk, index: int) -> ChatCompletionChunk:
        if index in self._relay:
            chunk.relay = self._relay[index]
        return chunk


def _data(chunk: ChatCompletionChunk) -> str:
    return f"data: {wire_json(chunk)}\n\n"
