"""The seam between the server and the engine: what the server may ask of an engine.

Pure: the server and its tests load without torch. `AsyncEngine` is the real implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from relaykv.engine.relay_profile import ChosenBands
from relaykv.engine.request import GenerateRequest, RequestOutput


class EngineDeadError(RuntimeError):
    """The engine thread has ended; no request can be served any more."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the server tells clients about the model that is loaded."""

    name: str  # as in /v1/models
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int
    created: int  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """One finished request that a session can relay from."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    taint: int  # approximate hand-offs behind it; 0 is exact


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the API shows it."""

    session: str
    recordings: tuple[RecordingInfo, ...]
    num_blocks: int
    num_bytes: int
    last_used: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class ShadowSummary:
    """How far answers under one policy were from full ones, where that was looked into."""

    policy: str
    num_runs: int
    mean_kl: float  # nats, over the first positions of an answer
    max_kl: float  # of one run
    agreement: float  # share of these positions with the same likeliest token


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges at one moment. Blocks: free + cached + recorded + used = total."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_recorded_blocks: int
    num_used_blocks: int
    num_total_blocks: int
    num_preemptions: int
    num_aborts: int
    num_anchors: int = 0  # of the policy kvcomm
    num_anchor_bytes: int = 0  # of the blocks that they hold, which count as recorded
    num_refused_anchors: int = 0  # that there was no room for
    default_policy: str = ""  # that sessions get now, when a request names none
    shadows: tuple[ShadowSummary, ...] = ()
    num_waiting_shadows: int = 0
    num_dropped_shadows: int = 0


class EngineClient(Protocol):
    """All methods belong to the asyncio thread."""

    @property
    def model(self) -> ModelCard: ...

    @property
    def policies(self) -> tuple[str, ...]:
        """Names that `RelayOptions.policy` may take."""
        ...

    @property
    def relay_bands(self) -> ChosenBands:
        """Where the policy `relay` repairs, and where that comes from."""
        ...

    def is_alive(self) -> bool:
        """False once the engine thread has died."""
        ...

    def is_ready(self) -> bool:
        """True when a request would be served now."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Yields outputs until one has a finish_reason. Closing the iterator early aborts.

        Raises:
            EngineDeadError: the engine has ended, before or during this request.
        """
        ...

    async def sessions(self, tenant: str) -> tuple[SessionInfo, ...]: ...

    async def delete_session(self, tenant: str, session: str) -> bool:
        """Drops a session's recordings. False when the tenant has no such session."""
        ...

    async def stats(self) -> EngineStats: ...
