"""Decides of every segment whether anchors correct it, or it is computed and becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relaykv.engine.anchor_pools import (
    Anchor,
    AnchorPools,
    AnchorVerdict,
    judge_anchors,
)
from relaykv.engine.batch import AnchorQuery
from relaykv.engine.handoff_slots import HandoffKey


class AnchorMeter(Protocol):
    """What measures segments on the device."""

    def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
        """Of each segment to each of its anchors. Waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Handoff:
    """A segment that is about to be handed on."""

    key: HandoffKey
    token_ids: tuple[int, ...]
    source_block_ids: tuple[int, ...]  # of the recording, in sequence order
    source_start: int  # position in the recording

    def query(self, anchors: Sequence[Anchor]) -> AnchorQuery:
        places = tuple(anchor.place for anchor in anchors)
        num_tokens = len(self.token_ids)
        return AnchorQuery(self.source_block_ids, self.source_start, num_tokens, places)


class AnchorGate:
    """Asks the device how far segments lie from their anchors where that decides.

    The answer is waited for, once per request whose segments have anchors: how long a plan takes
    depends on it. A step in flight is waited for with it.

    Attributes:
        pools: of the anchors that there are.
    """

    def __init__(
        self, pools: AnchorPools, meter: AnchorMeter, max_entropy: float, min_anchors: int
    ) -> None:
        """
        Args:
            max_entropy: see `judge_anchors`.
            min_anchors: as long as a segment, for it to be corrected.

        Raises:
            ValueError: one anchor would do; it weighs everything, however far it is.
        """
        if min_anchors < 2:
            raise ValueError(f"at least 2 anchors have to correct a segment, not {min_anchors}")
        self.pools = pools
        self._meter = meter
        self._max_entropy = max_entropy
        self._min_anchors = min_anchors
        # A request that finds no room asks again in every step.
        self._last: tuple[int, tuple[Handoff, ...], list[AnchorVerdict]] | None = None

    def judge(self, handoffs: Sequence[Handoff]) -> list[AnchorVerdict]:
        """Decides on the segments of one request."""
        wanted = (self.pools.version, tuple(handoffs))
        if self._last is None or self._last[:2] != wanted:
            self._last = (*wanted, self._judge(handoffs))
        return self._last[2]

    def _judge(self, handoffs: Sequence[Handoff]) -> list[AnchorVerdict]:
        anchors = [self._covering(handoff) for handoff in handoffs]
        verdicts = [
            self._without_distances(handoff, found)
            for handoff, found in zip(handoffs, anchors, strict=True)
        ]
        undecided = [number for number, verdict in enumerate(verdicts) if verdict is None]
        queries = [handoffs[number].query(anchors[number]) for number in undecided]
        distances = self._meter.anchor_distances(queries) if queries else []
        for number, found in zip(undecided, distances, strict=True):
            verdicts[number] = judge_anchors(anchors[number], found, self._max_entropy)
        return [verdict for verdict in verdicts if verdict is not None]

    def _covering(self, handoff: Handoff) -> list[Anchor]:
        """Anchors long enough to correct every token."""
        anchors = self.pools.anchors(handoff.key)
        return [anchor for anchor in anchors if anchor.covers(handoff.token_ids)]

    def _without_distances(
        self, handoff: Handoff, anchors: Sequence[Anchor]
    ) -> AnchorVerdict | None:
        """A verdict that needs none.

        The authors measure a text that is an anchor already once more, and then refuse it because
        two anchors fit equally well. Its own offsets are what is wanted: they serve it alone.
        """
        own = tuple(anchor for anchor in anchors if anchor.starts_with(handoff.token_ids))
        if own:
            return AnchorVerdict(own, "corrected by the anchor of this very text", own)
        if len(anchors) >= self._min_anchors:
            return None
        num_known = len(self.pools.anchors(handoff.key))
        kind = f"anchors of this kind of hand-off: {num_known}"
        if num_known > len(anchors):
            kind = f"{kind}, as long as this text: {len(anchors)}"
        return AnchorVerdict((), f"{kind}; {self._min_anchors} are needed")
