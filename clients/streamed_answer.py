"""One chat answer, read as a stream: its text, its timing and where its prompt came from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from relaykv.clients.openai_client import relay_of
from relaykv.clients.server_process import is_loopback


class IncompleteAnswerError(RuntimeError):
    """The stream ended before the answer did."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a prompt by where their KV came from; the four kinds add up to `total`."""

    total: int
    prefix: int  # exact prefix hits
    relayed: int  # relayed and left as they are
    recomputed: int  # relayed, then partly computed again
    computed: int
    recomputed_share: float = 0.0  # of the relayed segments' layer-tokens

    def __str__(self) -> str:
        return (
            f"prompt {self.total}: {self.prefix} prefix, {self.relayed} relayed,"
            f" {self.recomputed} repaired, {self.computed} computed"
        )

    @property
    def layer_share(self) -> float:
        """Part of the prompt's layer-tokens that was computed, 0 to 1."""
        if self.total == 0:
            return 0.0
        again = self.recomputed_share * (self.relayed + self.recomputed)
        return (self.computed + again) / self.total


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """What one request brought. Times are wall-clock seconds since it was sent."""

    text: str
    num_output_tokens: int
    first_token_s: float
    total_s: float
    prompt: PromptTokens
    reason: str | None = None  # why nothing was relayed, when the server says so


def open_client(root: str) -> openai.OpenAI:
    """A client for the server at `root`: no retries, because they would spoil the times."""
    http = openai.DefaultHttpxClient(trust_env=not is_loopback(root))
    return openai.OpenAI(
        base_url=f"{root}/v1", api_key="none", max_retries=0, timeout=1800.0, http_client=http
    )


def stream_answer(
    client: openai.OpenAI,
    *,
    model: str,
    system: str,
    user: str,
    max_tokens: int,
    extra_body: Mapping[str, Any] | None = None,
) -> StreamedAnswer:
    """Asks greedily and reads the stream to its end.

    Raises:
        openai.OpenAIError: the server cannot be reached, refused or failed.
        IncompleteAnswerError: the stream ended without a finish reason or without usage.
    """
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
    ]
    pieces: list[str] = []
    first_token_s: float | None = None
    finished = False
    usage: CompletionUsage | None = None
    relay: Mapping[str, Any] | None = None
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=dict(extra_body or {}),
    )
    for chunk in _chunks(stream):
        usage = chunk.usage or usage
        relay = relay_of(chunk) or relay
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finished = finished or choice.finish_reason is not None
            # A first token may be half a character: then the finish chunk is the first news.
            if first_token_s is None and (pieces[-1] or finished):
                first_token_s = time.perf_counter() - started
    total_s = time.perf_counter() - started
    if not finished or first_token_s is None:
        raise IncompleteAnswerError("the stream ended in the middle of an answer")
    if usage is None:
        raise IncompleteAnswerError("the stream held no usage although it was asked for")
    return StreamedAnswer(
        text="".join(pieces),
        num_output_tokens=usage.completion_tokens,
        first_token_s=first_token_s,
        total_s=total_s,
        prompt=prompt_tokens(usage, relay),
        reason=None if relay is None else relay.get("reason"),
    )


def _chunks(stream: openai.Stream[ChatCompletionChunk]) -> Iterator[ChatCompletionChunk]:
    """The stream's chunks, with a connection that breaks off told as an incomplete answer."""
    try:
        with stream:
            yield from stream
    except openai.OpenAIError:
        raise
    except Exception as error:  # the HTTP library under openai differs between its versions
        raise IncompleteAnswerError(f"the stream broke off: {error}") from error


def prompt_tokens(usage: CompletionUsage, relay: Mapping[str, Any] | None) -> PromptTokens:
    """Where a prompt came from: by `relay` where there is one, else by the usage."""
    total = usage.prompt_tokens
    if relay is not None:
        tokens = relay["tokens"]
        return PromptTokens(
            total=total,
            prefix=tokens["prefix"],
            relayed=tokens["relayed"],
            recomputed=tokens["recomputed"],
            computed=tokens["computed"],
            recomputed_share=relay.get("recomputed_share") or 0.0,
        )
    details = usage.prompt_tokens_details
    prefix = (details.cached_tokens or 0) if details is not None else 0
    return PromptTokens(
        total=total, prefix=prefix, relayed=0, recomputed=0, computed=total - prefix
    )
