"""What relaying did for one prompt, as plain numbers for the response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One relayed run of the prompt and where it came from. Ranges are half-open tokens."""

    start: int  # in this prompt
    stop: int
    source_request_id: str  # the recording that was read
    source_start: int  # in the recording
    num_recomputed_tokens: int


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
    reason: str | None = None  # why nothing was relayed although a session was named
