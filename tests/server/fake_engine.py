"""An engine that says what a test scripts, and a tokenizer and template without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relaykv.engine.client import EngineStats, ModelCard, RecordingInfo, SessionInfo, ShadowSummary
from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import BandsSource, ChosenBands
from relaykv.engine.relay_report import (
    PromptRun,
    RelayReport,
    RunKind,
    RunSource,
    SegmentReport,
)
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from relaykv.server.prompt import PromptBuilder
from relaykv.server.settings import ServerSettings
from relaykv.server.state import Backend, ServerState
from relaykv.server.tool_form import ToolForm

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300
MAX_MODEL_LEN = 400


class ByteTokenizer:
    """One token a byte; the control tokens are the ids from 256 on."""

    vocab_size = VOCAB_SIZE
    leading_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            special = next((token for token in SPECIAL_TOKENS if text.startswith(token)), None)
            if special is None:
                ids.extend(text[0].encode())
                text = text[1:]
            else:
                ids.append(256 + SPECIAL_TOKENS.index(special))
                text = text[len(special) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = b""
        for token_id in ids:
            if token_id < 256:
                pieces += bytes([token_id])
            elif not skip_special_tokens:
                pieces += self.token_bytes(token_id)
        return pieces.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return "".join(SPECIAL_TOKENS[token_id - 256 : token_id - 255]).encode()  # b"" when none


class ChatMlTemplate:
    """ChatML by hand; a user who says "refuse" makes it raise."""

    special_tokens = SPECIAL_TOKENS

    tool_form = ToolForm.GENERIC

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),  # noqa: ARG002
    ) -> str:
        if any(message["content"] == "refuse" for message in messages):
            raise ValueError("roles must alternate")
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return "".join(turns) + "<|im_start|>assistant\n"


@dataclass(slots=True)
class Script:
    """What every request gets."""

    pieces: tuple[str, ...] = ("Hel", "lo", " world")
    delay_s: float = 0.0  # before every piece
    finish: FinishReason = FinishReason.STOP
    error: str | None = None  # text of an ERROR finish
    raises: Exception | None = None  # after the pieces
    num_cached_tokens: int = 7
    started: list[GenerateRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)


class FakeEngine:
    """An `EngineClient` that plays a script."""

    def __init__(self, script: Script | None = None, name: str = "org/tiny") -> None:
        self.script = script or Script()
        self.alive = True
        self.ready = True
        self.model = ModelCard(name, MAX_MODEL_LEN, VOCAB_SIZE, created=1_700_000_000)
        self.policies = ("full", "shift", "relay")
        self.relay_bands = ChosenBands(
            Bands(1, 3, 6), BandsSource.OWN, "0123456789abcdef", Path("folder/profile.json")
        )
        self.moved: tuple[str, tuple[ShadowSummary, ...]] = ("", ())
        self.deleted: list[tuple[str, str]] = []
        self.tenants: list[str] = []

    def is_alive(self) -> bool:
        return self.alive

    def is_ready(self) -> bool:
        return self.ready

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        script, done = self.script, False
        script.started.append(request)
        try:
            num_output_tokens = 0
            for index, piece in enumerate(script.pieces):
                await asyncio.sleep(script.delay_s)
                num_output_tokens += len(piece.encode())
                relay = _report(request) if index == 0 else None
                output = self._output(request, piece, num_output_tokens, relay)
                yield output if index else replace(output, prompt_logprobs=_of_prompt(request))
            if script.raises is not None:
                raise script.raises
            done = True
            script.finished.append(request.request_id)
            last = self._output(request, "", num_output_tokens, _report(request), script.finish)
            yield last
        finally:
            if not done:
                script.aborted.append(request.request_id)

    def _output(
        self,
        request: GenerateRequest,
        text: str,
        num_output_tokens: int,
        relay: RelayReport | None,
        finish: FinishReason | None = None,
    ) -> RequestOutput:
        ids = tuple(text.encode())
        wanted = request.sampling.num_logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if wanted is not None:
            top = tuple((token, -0.5 - token) for token in range(wanted))
            logprobs = tuple(TokenLogprob(token_id, -0.5, top) for token_id in ids)
        num_prompt_tokens = len(request.prompt_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=ids,
            usage=Usage(num_prompt_tokens, num_output_tokens, self.script.num_cached_tokens),
            logprobs=logprobs,
            finish_reason=finish,
            relay=relay,
            error=self.script.error if finish is FinishReason.ERROR else None,
        )

    async def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        self.tenants.append(tenant)
        recording = RecordingInfo("chatcmpl-1", 10, 5, taint=0)
        return (SessionInfo("team/a", (recording,), 1, 1024, last_used=5.0),)

    async def delete_session(self, tenant: str, session: str) -> bool:
        self.deleted.append((tenant, session))
        return session == "team/a"

    async def stats(self) -> EngineStats:
        stats = EngineStats(0, 0, 1, 0, 0, 0, 1, 0, len(self.script.aborted))
        policy, shadows = self.moved
        return replace(stats, default_policy=policy, shadows=shadows)


def _of_prompt(request: GenerateRequest) -> tuple[TokenLogprob, ...]:
    if request.sampling.num_prompt_logprobs is None:
        return ()
    return tuple(TokenLogprob(token_id, -0.25) for token_id in request.prompt_token_ids[1:])


def _report(request: GenerateRequest) -> RelayReport:
    num_prompt_tokens = len(request.prompt_token_ids)
    return RelayReport(
        session=request.relay.session,
        policy=request.relay.policy or "relay",
        num_prefix_tokens=2,
        num_relayed_tokens=5,
        num_recomputed_tokens=1,
        num_computed_tokens=num_prompt_tokens - 8,
        recomputed_share=0.25,
        segments=(SegmentReport(2, 8, "chatcmpl-0", 30, 1, "shift"),),
        runs=(
            PromptRun(RunKind.PREFIX, 0, 2),
            PromptRun(RunKind.RELAYED, 2, 7, RunSource("chatcmpl-0", 30)),
            PromptRun(RunKind.RECOMPUTED, 7, 8, RunSource("chatcmpl-0", 35)),
            PromptRun(RunKind.COMPUTED, 8, num_prompt_tokens),
        ),
    )


def fake_state(
    engine: FakeEngine | None = None,
    settings: ServerSettings | None = None,
    template: ChatMlTemplate | None = None,
) -> ServerState:
    """A server's state around a fake engine."""
    prompts = PromptBuilder(template or ChatMlTemplate(), ByteTokenizer())
    backend = Backend(engine or FakeEngine(), prompts)
    return ServerState(settings or ServerSettings(version="1.2.3"), backend)


async def eventually(condition: Callable[[], bool], timeout_s: float = 3.0) -> bool:
    """Waits until a condition holds, or says that it does not within the time."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return condition()
