"""Anchors of recurring hand-offs: texts whose offsets were measured, and when they may be used.

KVCOMM (arXiv 2510.12872) corrects a relayed text by the offsets of earlier texts in the same place.
An offset is what the reader's own KV of a text had more than the KV that was recorded of it, token
by token. The values of the recording serve as the text's embedding: the nearer an anchor's are to
those of the text at hand, the more its offsets count.

An anchor lives in blocks of the KV cache. Its base is the recording's own blocks, which it keeps
from being reused; its offsets have blocks of their own. So its memory is part of the cache's, is
bounded by a share of it, and gives way when running requests need it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from relaykv.engine.batch import AnchorPlace
from relaykv.engine.block_pool import Block, BlockPool
from relaykv.engine.handoff_slots import HandoffKey
from relaykv.engine.recording import RecordingStore

# The authors' numbers: section 5.1 and their code.
MAX_ANCHORS = 20
_WINDOW = 5  # the anchors from which the one that gives way is taken: the oldest
_TOP_WEIGHT = 0.9  # anchors are counted as used that together weigh so much
# A pool that was not met for so many hand-offs of any kind gives way to anchors of others.
_STALE_HANDOFFS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """One measured text."""

    token_ids: tuple[int, ...]
    base_blocks: tuple[Block, ...]  # of the recording, from the one that holds its first token
    base_start: int  # position of the first token in these blocks
    offset_blocks: tuple[Block, ...]  # filled from their start

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*self.base_blocks, *self.offset_blocks)

    @property
    def place(self) -> AnchorPlace:
        return AnchorPlace(
            tuple(block.id for block in self.base_blocks),
            self.base_start,
            tuple(block.id for block in self.offset_blocks),
        )

    def covers(self, token_ids: Sequence[int]) -> bool:
        return len(self.token_ids) >= len(token_ids)

    def starts_with(self, token_ids: Sequence[int]) -> bool:
        return self.token_ids[: len(token_ids)] == tuple(token_ids)


@dataclass(frozen=True, slots=True)
class AnchorVerdict:
    """What the gate says of a segment."""

    anchors: tuple[Anchor, ...]  # that correct it; none: it is computed
    why: str
    used: tuple[Anchor, ...] = ()  # those of them that weigh most


@dataclass(slots=True, eq=False)
class _Pool:
    """Anchors of one kind of hand-off, the oldest first, and how often each was used."""

    uses: dict[Anchor, int] = field(default_factory=dict)
    last_met: int = 0  # in hand-offs of any kind

    def least_used(self) -> Anchor:
        """Of the oldest ones."""
        oldest = list(self.uses)[:_WINDOW]
        return min(oldest, key=lambda anchor: self.uses[anchor])


class AnchorPools:
    """One pool per kind of hand-off.

    Attributes:
        version: changes whenever an anchor comes or goes.
        num_refused: anchors that there was no room for.
    """

    def __init__(
        self, pool: BlockPool, recordings: RecordingStore, block_size: int, max_blocks: int
    ) -> None:
        """`max_blocks`: that all anchors together may hold."""
        self._pool = pool
        self._recordings = recordings
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._pools: OrderedDict[HandoffKey, _Pool] = OrderedDict()  # longest unmet first
        self._held: Counter[int] = Counter()  # anchors by block id
        self._num_handoffs = 0
        self.version = 0
        self.num_refused = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that anchors hold."""
        return len(self._held)

    @property
    def num_anchors(self) -> int:
        return sum(len(pool.uses) for pool in self._pools.values())

    def anchors(self, key: HandoffKey) -> tuple[Anchor, ...]:
        """All of one kind, the oldest first."""
        pool = self._pools.get(key)
        return tuple(pool.uses) if pool else ()

    def meet(self, key: HandoffKey, verdict: AnchorVerdict) -> None:
        """Takes in that a hand-off happens, and what corrects it."""
        self._num_handoffs += 1
        pool = self._pools.get(key)
        if pool is None:
            return
        pool.last_met = self._num_handoffs
        self._pools.move_to_end(key)
        for anchor in verdict.used:
            if anchor in pool.uses:  # it may be gone since the verdict
                pool.uses[anchor] += 1

    def add(
        self,
        key: HandoffKey,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        source_start: int,
    ) -> Anchor | None:
        """Makes room for an anchor, whose offsets have still to be written.

        Args:
            blocks: of the recording, from the one that holds the text's first token; more may
                follow. The caller holds them too.
            source_start: position of that token in the recording.

        Returns:
            None when the anchors' share of the cache is used up, or the cache by requests.
        """
        pool = self._pools.get(key)
        if pool is not None and len(pool.uses) >= MAX_ANCHORS:
            self.forget(key, pool.least_used())
        size = self._block_size
        base_start = source_start % size
        base_blocks = tuple(blocks[: -(-(base_start + len(token_ids)) // size)])
        num_new = -(-len(token_ids) // size)
        if not (self._has_share(base_blocks, num_new) and self._has_room(num_new)):
            self.num_refused += 1
            return None
        offset_blocks = tuple(self._pool.allocate(num_new))
        anchor = Anchor(tuple(token_ids), base_blocks, base_start, offset_blocks)
        self._pool.record(anchor.blocks)
        self._pool.release(offset_blocks)
        self._held.update(block.id for block in anchor.blocks)
        pool = self._pools.setdefault(key, _Pool(last_met=self._num_handoffs))
        pool.uses[anchor] = 0
        self.version += 1
        return anchor

    def forget(self, key: HandoffKey, anchor: Anchor) -> None:
        """Drops an anchor, unless it is gone already."""
        pool = self._pools.get(key)
        if pool is None or anchor not in pool.uses:
            return
        del pool.uses[anchor]
        if not pool.uses:
            del self._pools[key]
        self._held -= Counter(block.id for block in anchor.blocks)
        self._pool.unrecord(anchor.blocks)
        self.version += 1

    def evict_until(self, num_idle: int) -> bool:
        """Drops anchors, those of the kinds longest unmet first, until enough blocks are idle."""
        for key in list(self._pools):
            for anchor in self.anchors(key):
                if self._pool.num_idle >= num_idle:
                    return True
                self.forget(key, anchor)
        return self._pool.num_idle >= num_idle

    def _has_share(self, base_blocks: Sequence[Block], num_new: int) -> bool:
        """Whether an anchor is within the bound, perhaps in the place of stale ones."""
        while True:
            num_base = sum(block.id not in self._held for block in base_blocks)
            if self.num_blocks + num_base + num_new <= self._max_blocks:
                return True
            key = next(iter(self._pools), None)
            if key is None or self._num_handoffs - self._pools[key].last_met < _STALE_HANDOFFS:
                return False
            self.forget(key, self.anchors(key)[0])

    def _has_room(self, num_blocks: int) -> bool:
        if self._pool.num_idle >= num_blocks:
            return True
        # Recordings give way only where that is of use; anchors never do to another one.
        num_others = self._pool.num_blocks - self._pool.counts().used - self.num_blocks
        return num_others >= num_blocks and self._recordings.evict_until(num_blocks)


def judge_anchors(
    anchors: Sequence[Anchor], distances: Sequence[float], max_entropy: float
) -> AnchorVerdict:
    """The paper's gate (Eq. 5): the anchors' weights must be far from equal.

    It asks whether one anchor is nearer than the others, not whether any is near: the distances
    grow with the text and the model, and a few parts in a thousand decide. On 8 outputs of a tutor
    under the default model, 90 tokens each, distances are from 794 to 922; it passes 6 at entropies
    below 0.03, and 21 of 24 outputs of three agents. It is kept because it is what was published;
    `learned` goes by measured errors.

    Args:
        anchors: at least two, all as long as the segment or longer.
        distances: of each to the segment: the norm of the difference of their values over all
            layers, heads, channels and tokens of the segment.
        max_entropy: of the anchors' weights, as a share of the most that it can be; with 1 every
            segment passes.
    """
    nearest = min(distances)
    if not math.isfinite(nearest):
        return AnchorVerdict((), "the distances of its anchors are not finite")
    parts = [math.exp(nearest - distance) for distance in distances]
    weights = [part / sum(parts) for part in parts]
    entropy = -sum(weight * math.log(weight) for weight in weights if weight > 0)
    share = min(entropy / math.log(len(anchors)), 1.0)
    if share > max_entropy:
        why = (
            f"none of {len(anchors)} anchors stands out: the entropy of their weights is "
            f"{share:.2f} of the most that it can be, {max_entropy} is allowed"
        )
        return AnchorVerdict((), why)
    why = (
        f"corrected by {len(anchors)} anchors; the entropy of their weights is {share:.2f} of "
        "the most that it can be"
    )
    return AnchorVerdict(tuple(anchors), why, _heaviest(anchors, weights))


def _heaviest(anchors: Sequence[Anchor], weights: Sequence[float]) -> tuple[Anchor, ...]:
    """The fewest anchors that together weigh enough."""
    order = sorted(range(len(anchors)), key=lambda number: -weights[number])
    chosen, total = [], 0.0
    for number in order:
        chosen.append(anchors[number])
        total += weights[number]
        if total >= _TOP_WEIGHT:
            break
    return tuple(chosen)
