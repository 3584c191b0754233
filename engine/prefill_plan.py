"""What happens to every token of a prompt: hit in the prefix cache, relayed, or computed."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from relaykv.engine.policy import Policy
from relaykv.engine.segment import Segment


class SpanKind(enum.Enum):
    PREFIX = "prefix"  # its blocks are shared with the prefix cache
    RELAY = "relay"  # its KV is copied from a recording and shifted
    COMPUTE = "compute"  # every layer computes it


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open token range of the prompt that is treated in one way."""

    kind: SpanKind
    start: int
    stop: int
    segment: Segment | None = None  # of a RELAY span
    policy: Policy | None = None  # that a RELAY span is served by

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def cost(self, num_layers: int) -> float:
        """Expected layer-tokens computed per token, as a share of a full prefill."""
        return self.policy.relay_cost(num_layers) if self.policy else 1.0


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Spans that cover a prompt exactly once, in order."""

    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    def count(self, kind: SpanKind) -> int:
        """Tokens of one kind."""
        return sum(span.num_tokens for span in self.spans if span.kind is kind)

    def relay_spans(self, start: int, stop: int) -> Iterator[Span]:
        """The parts of RELAY spans inside [start, stop), with their segments clipped alike."""
        for span in self.spans:
            if span.segment is None:
                continue
            part = span.segment.clip(start, stop)
            if part.num_tokens > 0:
                yield Span(SpanKind.RELAY, part.start, part.stop, part, span.policy)

    def chunk_stop(self, start: int, budget: int, full_budget: int, num_layers: int) -> int:
        """How far a prefill chunk from `start` may go.

        A computed token costs 1, a relayed one what its policy expects. A relayed span is taken
        whole, because its policy compares its tokens with each other: the first of a chunk even
        when it overdraws the budget, so that a busy server cannot starve it. It is split only when
        it would not fit into `full_budget`, the budget of a step that does nothing else.

        Returns:
            The end of the chunk; `start` when less than one token fits into the budget.
        """
        position = start
        if budget < 1:
            return position
        left = float(budget)
        for span in self.spans:
            if span.stop <= position:
                continue
            remaining = span.stop - position
            token_cost = span.cost(num_layers)
            cost = remaining * token_cost
            if cost <= left:
                left -= cost
                position = span.stop
                continue
            if span.kind is SpanKind.COMPUTE:
                position += math.floor(left)
            elif position == start:
                position = (
                    span.stop if cost <= full_budget else start + math.floor(left / token_cost)
                )
            break
        return position


def plan_prefill(
    num_tokens: int,
    num_prefix_tokens: int,
    segments: Sequence[Segment],
    min_segment_tokens: int,
    policy_of: Callable[[Segment], Policy | None],
) -> PrefillPlan:
    """Lays the spans of a prompt: the prefix first, then segments, the rest computed.

    Args:
        num_tokens: length of the prompt.
        num_prefix_tokens: tokens of its prefix hit.
        segments: disjoint, in order; clipped to what the prefix leaves, and dropped where
            fewer than `min_segment_tokens` remain. The last token is always computed: its
            logits choose the first token of the answer.
        policy_of: what serves a segment, clipped; None: it is computed.
    """
    spans: list[Span] = []
    if num_prefix_tokens:
        spans.append(Span(SpanKind.PREFIX, 0, num_prefix_tokens))
    position = num_prefix_tokens
    for segment in segments:
        part = segment.clip(position, num_tokens - 1)
        policy = policy_of(part) if part.num_tokens >= min_segment_tokens else None
        if policy is None:
            continue
        if part.start > position:
            spans.append(Span(SpanKind.COMPUTE, position, part.start))
        spans.append(Span(SpanKind.RELAY, part.start, part.stop, part, policy))
        position = part.stop
    if position < num_tokens:
        spans.append(Span(SpanKind.COMPUTE, position, num_tokens))
    return PrefillPlan(tuple(spans))
