"""Gives a waiting request its plan and its blocks, or says that it must wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.anchor_gate import AnchorGate
from relaykv.engine.anchor_pools import Anchor
from relaykv.engine.batch import RelayCopy
from relaykv.engine.block_pool import Block, BlockPool
from relaykv.engine.handoff_slots import HandoffSlots
from relaykv.engine.prefill_plan import PrefillPlan, plan_prefill
from relaykv.engine.prefix_cache import PrefixCache, PrefixMatch, approximation_salt
from relaykv.engine.recording import Recording, RecordingStore
from relaykv.engine.request_state import HeldObservation, Request, SegmentSource
from relaykv.engine.segment import Segment
from relaykv.engine.segment_choice import SegmentChoice, SegmentChooser


@dataclass(frozen=True, slots=True)
class _Source:
    """A segment with its recording, which making room may evict from the store."""

    choice: SegmentChoice
    recording: Recording
    # That hold it, then those of its anchors; held for it. None where nothing is read.
    blocks: tuple[Block, ...]

    @property
    def _anchors(self) -> tuple[Anchor, ...]:
        return () if self.choice.verdict is None else self.choice.verdict.anchors

    def copy(self, block_ids: tuple[int, ...]) -> RelayCopy:
        """Its way into a request's own blocks."""
        segment = self.choice.segment
        return RelayCopy(
            source_block_ids=tuple(block.id for block in self.recording.blocks),
            source_start=segment.source_start,
            block_ids=block_ids,
            start=segment.start,
            num_tokens=segment.num_tokens,
            offset_index=self.choice.offset_index,
            anchors=tuple(anchor.place for anchor in self._anchors),
        )

    def report(self) -> SegmentSource:
        segment, policy = self.choice.segment, self.choice.policy
        return SegmentSource(
            segment.start,
            segment.stop,
            self.recording.request_id,
            segment.source_start,
            "full" if policy is None else policy.name,
            self.choice.why,
        )


class Admission:
    """Looks for reusable KV and claims blocks for one request at a time."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        recordings: RecordingStore,
        block_size: int,
        min_segment_tokens: int,
        handoffs: HandoffSlots | None = None,
        anchors: AnchorGate | None = None,
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._recordings = recordings
        self._block_size = block_size
        self._min_segment_tokens = min_segment_tokens
        self._anchors = anchors
        self._chooser = SegmentChooser(recordings, handoffs, anchors)

    def make_room(self, num_blocks: int) -> bool:
        """Evicts recordings, then anchors, if that makes `num_blocks` blocks idle.

        Returns whether they are.
        """
        if self._pool.num_idle >= num_blocks:
            return True
        counts = self._pool.counts()
        if self._pool.num_blocks - counts.used < num_blocks:
            return False  # running requests hold too much; evicting would only do harm
        if self._recordings.evict_until(num_blocks):
            return True
        return self._anchors is not None and self._anchors.pools.evict_until(num_blocks)

    def admit(self, request: Request) -> list[RelayCopy] | None:
        """Plans a request and claims the blocks of all its present tokens.

        Returns:
            The copies that its first step must carry out; None when there is no room, in
            which case the request is as it was.
        """
        prefix = self._match_prefix(request)
        self._pool.hold(prefix.blocks)
        sources = self._hold_sources(self._choose(request, prefix))
        num_new = -(-len(request.token_ids) // self._block_size) - len(prefix.blocks)
        has_room = self.make_room(num_new)
        lacks_room = not has_room and any(source.blocks for source in sources)
        if lacks_room:
            # The sources themselves may be what is in the way: compute instead.
            self._release_sources(sources)
            sources = []
            has_room = self.make_room(num_new)
        if not has_room:
            self._release_sources(sources)
            self._pool.release(prefix.blocks)
            return None
        plan = self._plan(request, prefix, [source.choice for source in sources])
        request.blocks = [*prefix.blocks, *self._pool.allocate(num_new)]
        request.block_hashes = list(prefix.hashes)
        request.num_computed_tokens = len(prefix.blocks) * self._block_size
        request.num_collected_tokens = request.num_computed_tokens
        request.plan = plan
        return self._note(request, prefix, sources, lacks_room)

    def _match_prefix(self, request: Request) -> PrefixMatch:
        if request.computes_all:
            return PrefixMatch((), (), 0)
        salt = None
        key = request.session_key
        if key is not None and request.policy.relays:
            salt = approximation_salt(key.tenant, key.session, request.policy.name)
        return self._prefix_cache.match(request.token_ids, request.spec.tenant, salt)

    def _match_segments(self, request: Request, prefix: PrefixMatch) -> list[Segment]:
        key = request.session_key
        if key is None or not request.policy.relays or request.computes_all:
            return []
        start = len(prefix.blocks) * self._block_size
        without = request.spec.relay.not_from
        return self._recordings.match(key, request.token_ids, start, without)

    def _choose(self, request: Request, prefix: PrefixMatch) -> list[SegmentChoice]:
        """Decides on every segment that is long enough behind the prefix."""
        start, stop = len(prefix.blocks) * self._block_size, len(request.token_ids) - 1
        parts = [part.clip(start, stop) for part in self._match_segments(request, prefix)]
        long = [part for part in parts if part.num_tokens >= self._min_segment_tokens]
        is_exact = prefix.num_exact_blocks == len(prefix.blocks)
        return self._chooser.choose(request, long, is_exact and not request.num_output_tokens)

    def _plan(
        self, request: Request, prefix: PrefixMatch, choices: Sequence[SegmentChoice]
    ) -> PrefillPlan:
        policies = {choice.segment.start: choice.policy for choice in choices}
        return plan_prefill(
            len(request.token_ids),
            len(prefix.blocks) * self._block_size,
            [choice.segment for choice in choices],
            self._min_segment_tokens,
            lambda part: policies[part.start],
        )

    def _hold_sources(self, choices: Sequence[SegmentChoice]) -> list[_Source]:
        """Keeps the blocks that will be read from being reused before they have been."""
        sources = []
        for choice in choices:
            segment = choice.segment
            blocks: tuple[Block, ...] = ()
            recording = self._recordings[segment.recording_id]
            if choice.policy is not None or choice.observe:
                blocks = self._covering(recording.blocks, segment.source_start, segment.num_tokens)
                if choice.verdict is not None:
                    blocks += tuple(b for anchor in choice.verdict.anchors for b in anchor.blocks)
                self._pool.hold(blocks)
            sources.append(_Source(choice, recording, blocks))
        return sources

    def _covering(self, blocks: Sequence[Block], start: int, num_tokens: int) -> tuple[Block, ...]:
        size = self._block_size
        return tuple(blocks[start // size : (start + num_tokens - 1) // size + 1])

    def _release_sources(self, sources: Sequence[_Source]) -> None:
        for source in sources:
            self._pool.release(source.blocks)

    def _note(
        self,
        request: Request,
        prefix: PrefixMatch,
        sources: Sequence[_Source],
        lacks_room: bool,
    ) -> list[RelayCopy]:
        """Sets what follows from the plan: where KV turns approximate, taint, the report."""
        request.approximate_from = None
        request.taint = 0  # of an earlier admission, whose KV is gone
        if prefix.num_exact_blocks < len(prefix.blocks):
            request.approximate_from = prefix.num_exact_blocks * self._block_size
            request.taint = 1
        copies = []
        block_ids = tuple(block.id for block in request.blocks)
        relayed = [source for source in sources if source.choice.policy is not None]
        for source in relayed:
            if request.approximate_from is None:
                request.approximate_from = source.choice.segment.start
            request.taint = max(request.taint, source.recording.taint + 1)
            request.source_blocks.extend(source.blocks)
            copies.append(source.copy(block_ids))
        for source in sources:
            key = source.choice.key
            if source.choice.observe and key is not None:
                copy = source.copy(block_ids)
                token_ids = None
                if source.choice.verdict is not None:
                    token_ids = tuple(request.token_ids[copy.start : copy.start + copy.num_tokens])
                held = HeldObservation(key, copy, source.blocks, token_ids)
                request.observations.append(held)
        if request.first_plan is None:
            self._chooser.count([source.choice for source in sources])
            computed = [source for source in sources if source.choice.policy is None]
            request.first_plan = request.plan
            request.sources = tuple(source.report() for source in relayed)
            request.computed_sources = tuple(source.report() for source in computed)
            request.refusal = self._refusal(request, bool(relayed), lacks_room)
        return copies

    def _refusal(self, request: Request, relayed: bool, lacks_room: bool) -> str | None:
        key = request.session_key
        if key is None or relayed:
            return None
        if request.computes_all:
            return "log-probabilities of the prompt need all of it computed"
        if not request.policy.relays:
            return f"policy {request.policy.name!r} relays nothing"
        if lacks_room:
            return "the KV cache has no room for the recordings beside this request"
        if request.computed_sources:
            return "; ".join(dict.fromkeys(source.why or "" for source in request.computed_sources))
        if not self._recordings.has_session(key):
            return "the session holds no recordings yet"
        return (
            "no run of at least "
            f"{self._min_segment_tokens} tokens of this session's recordings stands in the prompt"
        )
