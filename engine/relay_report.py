"""What relaying did for one prompt, as plain numbers for the response."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RunKind(enum.StrEnum):
    """What happened to a token of the prompt."""

    PREFIX = "prefix"  # exact prefix hit
    RELAYED = "relayed"  # relayed and left as it is
    RECOMPUTED = "recomputed"  # relayed, then computed again from the selection layer on
    COMPUTED = "computed"  # computed in full


@dataclass(frozen=True, slots=True)
class RunSource:
    """Where the first token of a run stood in the recording that was read."""

    request_id: str
    start: int


@dataclass(frozen=True, slots=True)
class PromptRun:
    """A half-open range of the prompt's tokens of one kind, from one place."""

    kind: RunKind
    start: int
    stop: int
    source: RunSource | None = None  # of RELAYED and RECOMPUTED


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One run of the prompt that a recording holds. Ranges are half-open tokens."""

    start: int  # in this prompt
    stop: int
    source_request_id: str  # the recording
    source_start: int  # in the recording
    num_recomputed_tokens: int
    policy: str  # that served it; "full": it was computed
    why: str | None = None  # where the policy had a choice


@dataclass(frozen=True, slots=True)
class RelayReport:
    """Prompt tokens by kind; the four counts add up to the prompt's length.

    `recomputed_share` is the part of the relayed segments' layer-tokens that was computed
    again (0 for pure reuse, 1 for a full prefill of them), the cost measure of RelayCaching
    (arXiv 2603.13289, section 5) and of EPIC and CacheBlend.
    """

    session: str | None
    policy: str
    num_prefix_tokens: int  # exact prefix hits
    num_relayed_tokens: int  # relayed and left as they are
    num_recomputed_tokens: int  # relayed, then computed again from the selection layer on
    num_computed_tokens: int  # computed in full
    recomputed_share: float = 0.0
    segments: tuple[SegmentReport, ...] = ()  # filled when the request asked to explain
    runs: tuple[PromptRun, ...] = ()  # likewise; they cover the prompt once, in order
    reason: str | None = None  # why nothing was relayed although a session was named
