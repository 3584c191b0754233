"""Runs the choices of one answer at the same time and merges what they produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from relaykv.engine.client import EngineClient
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from relaykv.server.errors import ApiError
from relaykv.server.responses import finish_reason_text

_Event = tuple[int, RequestOutput | Exception | None]  # None: that choice has ended


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice from its start to its end."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for
    prompt_logprobs: tuple[TokenLogprob, ...]  # likewise
    usage: Usage
    finish_reason: str  # in OpenAI's words
    relay: RelayReport | None


class ChoiceOutputs:
    """Outputs of all choices in order of arrival; leaving the context aborts what still runs.

    Choices that share a prompt start when the first of them has produced something: by then the
    prompt is in the prefix cache, so that it is computed once.
    """

    def __init__(self, engine: EngineClient, requests: Sequence[GenerateRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_ended = 0
        self._followers = _followers(requests)

    async def __aenter__(self) -> ChoiceOutputs:
        for leader in self._followers:
            self._start(leader)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The next output with its choice's index; None when every choice has ended.

        Cancelling the wait loses nothing.

        Raises:
            ApiError: 500, a choice failed.
            EngineDeadError: the engine has ended.
        """
        while self._num_ended < len(self._requests):
            index, event = await self._events.get()
            for follower in self._followers.pop(index, ()):
                self._start(follower)
            if isinstance(event, Exception):
                raise event
            if event is not None:
                return index, _regular(event)
            self._num_ended += 1
        return None

    def _start(self, index: int) -> None:
        self._tasks.append(asyncio.create_task(self._pump(index, self._requests[index])))

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        try:
            outputs = self._engine.generate(request)
            try:
                async for output in outputs:
                    self._events.put_nowait((index, output))
            finally:
                await _close(outputs)
        except Exception as error:  # handed over: it is raised where the answer is made
            self._events.put_nowait((index, error))
        else:
            self._events.put_nowait((index, None))


async def finished_choices(
    engine: EngineClient, requests: Sequence[GenerateRequest]
) -> list[FinishedChoice]:
    """Generates every choice to its end.

    Raises:
        ApiError: a choice failed.
        EngineDeadError: the engine has ended.
    """
    outputs: list[list[RequestOutput]] = [[] for _ in requests]
    async with ChoiceOutputs(engine, requests) as arriving:
        while (item := await arriving.next()) is not None:
            index, output = item
            outputs[index].append(output)
    return [_finished(of_choice) for of_choice in outputs]


def _finished(outputs: Sequence[RequestOutput]) -> FinishedChoice:
    last = outputs[-1]
    assert last.finish_reason is not None
    reports = [output.relay for output in outputs if output.relay is not None]
    return FinishedChoice(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=outputs[0].prompt_logprobs,
        usage=last.usage,
        finish_reason=finish_reason_text(last.finish_reason),
        relay=reports[-1] if reports else None,
    )


def _followers(requests: Sequence[GenerateRequest]) -> dict[int, list[int]]:
    """By the first request with a prompt: the others that have the same one."""
    leaders: dict[tuple[int, ...], int] = {}
    followers: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        leader = leaders.setdefault(request.prompt_token_ids, index)
        if leader == index:
            followers[index] = []
        else:
            followers[leader].append(index)
    return followers


def _regular(output: RequestOutput) -> RequestOutput:
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error or "The engine failed to serve this request.")
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "The request was aborted by the server.", code="request_aborted")
    return output


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    # Only generators have it, and only they hold something to release.
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
