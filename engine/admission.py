"""Gives a waiting request its plan and its blocks, or says that it must wait."""

from __future__ import annotations

from relaykv.engine.batch import RelayCopy
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.prefill_plan import PrefillPlan, plan_prefill
from relaykv.engine.prefix_cache import PrefixCache, PrefixMatch, approximation_salt
from relaykv.engine.recording import Recording, RecordingStore
from relaykv.engine.request_state import Request, SegmentSource
from relaykv.engine.segment import Segment


class Admission:
    """Looks for reusable KV and claims blocks for one request at a time."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        recordings: RecordingStore,
        block_size: int,
        min_segment_tokens: int,
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._recordings = recordings
        self._block_size = block_size
        self._min_segment_tokens = min_segment_tokens

    def make_room(self, num_blocks: int) -> bool:
        """Evicts recordings if that makes `num_blocks` blocks idle; says whether they are."""
        if self._pool.num_idle >= num_blocks:
            return True
        counts = self._pool.counts()
        if self._pool.num_blocks - counts.used < num_blocks:
            return False  # running requests hold too much; evicting would only do harm
        return self._recordings.evict_until(num_blocks)

    def admit(self, request: Request) -> list[RelayCopy] | None:
        """Plans a request and claims the blocks of all its present tokens.

        Returns:
            The copies that its first step must carry out; None when there is no room, in
            which case the request is as it was.
        """
        prefix = self._match_prefix(request)
        self._pool.hold(prefix.blocks)
        segments = self._match_segments(request, prefix)
        plan = self._plan(request, prefix, segments)
        sources = self._hold_sources(request, plan)
        num_new = -(-len(request.token_ids) // self._block_size) - len(prefix.blocks)
        if not self.make_room(num_new) and request.source_blocks:
            # The sources themselves may be what is in the way: compute instead.
            self._release_sources(request)
            plan = self._plan(request, prefix, [])
        if not self.make_room(num_new):
            self._release_sources(request)
            self._pool.release(prefix.blocks)
            return None
        request.blocks = [*prefix.blocks, *self._pool.allocate(num_new)]
        request.block_hashes = list(prefix.hashes)
        request.num_computed_tokens = len(prefix.blocks) * self._block_size
        request.num_collected_tokens = request.num_computed_tokens
        request.plan = plan
        return self._note(request, prefix, plan, sources)

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
        return self._recordings.match(key, request.token_ids, start)

    def _plan(self, request: Request, prefix: PrefixMatch, segments: list[Segment]) -> PrefillPlan:
        num_prefix_tokens = len(prefix.blocks) * self._block_size
        return plan_prefill(
            len(request.token_ids),
            num_prefix_tokens,
            segments,
            self._min_segment_tokens,
            lambda _: request.policy,
        )

    def _hold_sources(self, request: Request, plan: PrefillPlan) -> dict[int, Recording]:
        """Keeps the blocks that will be read from being reused before the copy has run.

        Returns:
            The recordings by id: making room may evict them from the store.
        """
        sources: dict[int, Recording] = {}
        for span in plan.relay_spans(0, plan.num_tokens):
            segment = span.segment
            assert segment is not None
            first = segment.source_start // self._block_size
            last = (segment.source_start + segment.num_tokens - 1) // self._block_size
            recording = self._recordings[segment.recording_id]
            blocks = recording.blocks[first : last + 1]
            self._pool.hold(blocks)
            request.source_blocks.extend(blocks)
            sources[recording.id] = recording
        return sources

    def _release_sources(self, request: Request) -> None:
        self._pool.release(request.source_blocks)
        request.source_blocks.clear()

    def _note(
        self,
        request: Request,
        prefix: PrefixMatch,
        plan: PrefillPlan,
        recordings: dict[int, Recording],
    ) -> list[RelayCopy]:
        """Sets what follows from the plan: where KV turns approximate, taint, the report."""
        request.approximate_from = None
        request.taint = 0  # of an earlier admission, whose KV is gone
        if prefix.num_exact_blocks < len(prefix.blocks):
            request.approximate_from = prefix.num_exact_blocks * self._block_size
            request.taint = 1
        copies, sources = [], []
        block_ids = tuple(block.id for block in request.blocks)
        for span in plan.relay_spans(0, plan.num_tokens):
            segment = span.segment
            assert segment is not None
            recording = recordings[segment.recording_id]
            if request.approximate_from is None:
                request.approximate_from = span.start
            request.taint = max(request.taint, recording.taint + 1)
            sources.append(
                SegmentSource(span.start, span.stop, recording.request_id, segment.source_start)
            )
            copies.append(
                RelayCopy(
                    source_block_ids=tuple(block.id for block in recording.blocks),
                    source_start=segment.source_start,
                    block_ids=block_ids,
                    start=span.start,
                    num_tokens=span.num_tokens,
                )
            )
        if request.first_plan is None:
            request.first_plan = plan
            request.sources = tuple(sources)
            request.refusal = self._refusal(request, bool(sources), bool(recordings))
        return copies

    def _refusal(self, request: Request, relayed: bool, found: bool) -> str | None:
        key = request.session_key
        if key is None or relayed:
            return None
        if request.computes_all:
            return "log-probabilities of the prompt need all of it computed"
        if not request.policy.relays:
            return f"policy {request.policy.name!r} relays nothing"
        if found:
            return "the KV cache has no room for the recordings beside this request"
        if not self._recordings.has_session(key):
            return "the session holds no recordings yet"
        return (
            "no run of at least "
            f"{self._min_segment_tokens} tokens of this session's recordings stands in the prompt"
        )
