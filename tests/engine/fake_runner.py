"""A model runner without a model, which knows what every slot of the cache ought to hold."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relaykv.engine.batch import (
    UNKNOWN_TOKEN,
    AnchorPlace,
    AnchorQuery,
    AnchorRecord,
    HoldoutError,
    ModelRunnerOutput,
    Observation,
    RecomputeCount,
    RelayCopy,
    SampledToken,
    ScheduledBatch,
    ScheduledRequest,
)
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.request_state import Request

VOCAB_SIZE = 1000
_OFFSETS = ("", "", "offsets of an anchor")  # no request may read them as KV


def next_token(token_ids: Sequence[int]) -> int:
    """Greedy decoding of a model whose every token depends on all before it."""
    digest = hashlib.sha256(array("I", token_ids).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class SlotContent:
    """Whose KV a slot holds. `approximation` is None for exact KV."""

    token_id: int
    position: int
    tenant: str
    approximation: tuple[str, str, str] | None  # (tenant, session, policy) that may read it


@dataclass(frozen=True, slots=True)
class _Part:
    """What a step is launched with for one request, which may have gone on when it runs."""

    scheduled: ScheduledRequest
    known_token_ids: list[int]
    tenant: str
    session: str | None
    reader: tuple[str, str, str] | None  # whose approximate KV this may read


@dataclass(slots=True)
class FakeStep:
    """A launched step. Deferred, it touches the cache only when its result is asked for."""

    runner: FakeRunner
    number: int
    batch: ScheduledBatch
    parts: list[_Part]
    output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        return self.runner.collect(self)


@dataclass(frozen=True, slots=True)
class FakeErrors:
    """What a fake mean leaves of an observation: the same every time."""

    num_lessons: tuple[int, ...]

    def result(self) -> tuple[tuple[HoldoutError, ...], ...]:
        return tuple((HoldoutError(0.5, 0.5),) * count for count in self.num_lessons)


class FakeRunner:
    """Answers deterministically; fails as soon as a request would read another's KV.

    What the scheduler has decided is checked when a step is launched, what the cache holds when
    it runs. In between may lie the launch of the next step, as on a device with a queue.

    Attributes:
        events: what was launched and collected, by the number of the step.
        fail: called with "launch" or "result" and the number of the step; may raise.
    """

    num_layers = 8
    grammars = None

    def __init__(
        self,
        block_size: int,
        request_of: Callable[[str], Request],
        pool: BlockPool,
        deferred: bool = False,
    ) -> None:
        self._block_size = block_size
        self._request_of = request_of
        self._pool = pool
        self._deferred = deferred
        self._slots: dict[int, SlotContent] = {}
        self._last: Mapping[str, SampledToken] = {}  # of the step that ran last
        self._num_launched = 0
        self._num_collected = 0
        self.num_copied_tokens = 0
        self.num_observed_tokens = 0
        self.num_anchored_tokens = 0  # stored
        self.num_corrected_tokens = 0  # by anchors
        self.events: list[tuple[str, int]] = []
        self.fail: Callable[[str, int], None] = lambda _event, _number: None

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        assert len({part.request_id for part in batch.requests}) == len(batch.requests)
        by_blocks = {part.block_ids: part.request_id for part in batch.requests}
        for copy in batch.copies:
            request = self._request_of(by_blocks[copy.block_ids])
            self._check_writable(request, copy.start, copy.start + copy.num_tokens)
        step = FakeStep(self, self._num_launched, batch, [self._part(p) for p in batch.requests])
        self.fail("launch", step.number)
        self.events.append(("launch", step.number))
        self._num_launched += 1
        if not self._deferred:
            step.output = self._run(step)
        return step

    def collect(self, step: FakeStep) -> ModelRunnerOutput:
        assert step.number == self._num_collected, "a step collected out of order"
        self._num_collected += 1
        self.events.append(("result", step.number))
        self.fail("result", step.number)  # a deferred step has computed nothing then
        return step.output or self._run(step)

    def observe(self, observations: Sequence[Observation]) -> FakeErrors:
        """Both sides must still hold the same tokens, and exact KV of them."""
        for observation in observations:
            copy = observation.copy
            for offset in range(copy.num_tokens):
                source = self._slots[self._slot(copy.source_block_ids, copy.source_start + offset)]
                target = self._slots[self._slot(copy.block_ids, copy.start + offset)]
                assert source.token_id == target.token_id
                assert source.position == copy.source_start + offset
                assert target.position == copy.start + offset
                assert source.tenant == target.tenant
                assert source.approximation is target.approximation is None
            self.num_observed_tokens += copy.num_tokens
        return FakeErrors(tuple(len(observation.lessons) for observation in observations))

    def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
        """Anchors are the farther the more of their tokens differ. All must hold what they did."""
        distances = []
        for query in queries:
            row = []
            for anchor in query.anchors:
                different = 0
                for offset in range(query.num_tokens):
                    position = query.source_start + offset
                    source = self._slots[self._slot(query.source_block_ids, position)]
                    assert source.position == position
                    base, _ = self._anchored(anchor, offset)
                    different += base.token_id != source.token_id
                    assert base.tenant == source.tenant
                row.append(float(different))
            distances.append(row)
        return distances

    def store_anchors(self, records: Sequence[AnchorRecord]) -> None:
        """Both sides must still hold the same tokens, and the anchor's blocks be its own."""
        for record in records:
            copy, place = record.copy, record.place
            for offset in range(copy.num_tokens):
                source = self._slots[self._slot(copy.source_block_ids, copy.source_start + offset)]
                target = self._slots[self._slot(copy.block_ids, copy.start + offset)]
                base = self._slots[self._slot(place.base_block_ids, place.base_start + offset)]
                assert source is base
                assert source.token_id == target.token_id
                assert source.position == copy.source_start + offset
                assert target.position == copy.start + offset
                assert source.tenant == target.tenant
                kept = replace(source, position=offset, approximation=_OFFSETS)
                self._slots[self._slot(place.offset_block_ids, offset)] = kept
            self.num_anchored_tokens += copy.num_tokens

    def _anchored(self, anchor: AnchorPlace, offset: int) -> tuple[SlotContent, SlotContent]:
        """What an anchor holds of one token."""
        base = self._slots[self._slot(anchor.base_block_ids, anchor.base_start + offset)]
        kept = self._slots[self._slot(anchor.offset_block_ids, offset)]
        assert kept.approximation == _OFFSETS, "an anchor's offsets are overwritten"
        assert (kept.token_id, kept.position) == (base.token_id, offset)
        assert kept.tenant == base.tenant
        return base, kept

    def _part(self, scheduled: ScheduledRequest) -> _Part:
        """Checks a part against its request while the two belong together."""
        request = self._request_of(scheduled.request_id)
        assert scheduled.start == request.num_computed_tokens
        awaited = (UNKNOWN_TOKEN,) * request.num_awaited_tokens
        token_ids = (*request.token_ids, *awaited)
        assert scheduled.token_ids == token_ids[scheduled.start : scheduled.stop]
        assert len(awaited) == (UNKNOWN_TOKEN in scheduled.token_ids), "a step too far ahead"
        assert scheduled.block_ids == tuple(block.id for block in request.blocks)
        self._check_writable(request, scheduled.start, scheduled.stop)
        for span in scheduled.relay_spans:
            assert scheduled.start <= span.start < span.stop <= scheduled.stop
        row = scheduled.sampling
        if row is not None:
            assert (*row.prompt_token_ids, *row.output_token_ids) == token_ids
            assert not (awaited and request.samples_by_known_tokens)
            assert (
                scheduled.stop
                == len(token_ids)
                < request.num_prompt_tokens + (request.spec.sampling.max_tokens)
            )
        session, tenant = request.spec.relay.session, request.spec.tenant
        return _Part(scheduled, list(request.token_ids), tenant, session, _reader(request))

    def _check_writable(self, request: Request, start: int, stop: int) -> None:
        """Blocks that are written belong to one request alone and are not named yet."""
        first, last = start // self._block_size, (stop - 1) // self._block_size
        for block in request.blocks[first : last + 1]:
            assert block.num_requests == 1
            assert block.num_recordings == 0
            assert block.hash is None

    def _run(self, step: FakeStep) -> ModelRunnerOutput:
        token_ids = {part.scheduled.request_id: self._all_tokens(part) for part in step.parts}
        by_blocks = {part.scheduled.block_ids: part for part in step.parts}
        for copy in step.batch.copies:
            part = by_blocks[copy.block_ids]
            self._copy(copy, part, token_ids[part.scheduled.request_id])
        for part in step.parts:
            self._check_past(part, token_ids[part.scheduled.request_id])
        for part in step.parts:
            self._compute(part, token_ids[part.scheduled.request_id])
        for part in step.parts:  # nobody wrote over another's rows
            self._check_range(part, token_ids[part.scheduled.request_id], 0, part.scheduled.stop)
        self._last = {
            part.request_id: SampledToken(next_token(token_ids[part.request_id]), None)
            for part in step.batch.requests
            if part.sampling is not None
        }
        recomputed = {
            part.request_id: RecomputeCount(
                {s.start: tuple(range(min(3, s.num_tokens))) for s in part.relay_spans},
                3 * len(part.relay_spans),
            )
            for part in step.batch.requests
            if any(span.policy and span.policy.bands for span in part.relay_spans)
        }
        return ModelRunnerOutput(self._last, recomputed)

    def _all_tokens(self, part: _Part) -> list[int]:
        """The request's tokens, the unknown one taken from the step before."""
        if UNKNOWN_TOKEN not in part.scheduled.token_ids:
            return part.known_token_ids
        return [*part.known_token_ids, self._last[part.scheduled.request_id].token_id]

    def _copy(self, copy: RelayCopy, part: _Part, token_ids: Sequence[int]) -> None:
        for offset in range(copy.num_tokens):
            position = copy.start + offset
            source = self._slots[self._slot(copy.source_block_ids, copy.source_start + offset)]
            assert source.position == copy.source_start + offset == position - copy.shift
            assert source.token_id == token_ids[position]
            assert source.tenant == part.tenant
            if source.approximation is not None:
                assert source.approximation[:2] == (part.tenant, part.session)
            self._slots[self._slot(copy.block_ids, position)] = replace(
                source, position=position, approximation=part.reader
            )
            for anchor in copy.anchors:
                assert self._anchored(anchor, offset)[0].tenant == part.tenant
        self.num_copied_tokens += copy.num_tokens
        self.num_corrected_tokens += copy.num_tokens if copy.anchors else 0

    def _check_past(self, part: _Part, token_ids: Sequence[int]) -> None:
        """The KV of all earlier and all relayed tokens is there and may be read."""
        self._check_range(part, token_ids, 0, part.scheduled.start)
        for span in part.scheduled.relay_spans:
            self._check_range(part, token_ids, span.start, span.stop)

    def _check_range(self, part: _Part, token_ids: Sequence[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            slot = self._slots[self._slot(part.scheduled.block_ids, position)]
            assert slot.token_id == token_ids[position], "the KV of another token"
            assert slot.position == position, "the KV of another position"
            assert slot.tenant == part.tenant, "the KV of another tenant"
            assert slot.approximation in (None, part.reader), "approximate KV"

    def _compute(self, part: _Part, token_ids: Sequence[int]) -> None:
        scheduled = part.scheduled
        relayed = {p for span in scheduled.relay_spans for p in range(span.start, span.stop)}
        approximate = any(
            self._slots[self._slot(scheduled.block_ids, position)].approximation is not None
            for position in range(scheduled.start)
        )
        for position in range(scheduled.start, scheduled.stop):
            if position in relayed:
                approximate = True  # and so is all that attends to it
                continue
            self._slots[self._slot(scheduled.block_ids, position)] = SlotContent(
                token_ids[position],
                position,
                part.tenant,
                part.reader if approximate else None,
            )

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        size = self._block_size
        return block_ids[position // size] * size + position % size


def _reader(request: Request) -> tuple[str, str, str] | None:
    session = request.spec.relay.session
    if session is None or not request.policy.relays:
        return None
    return request.spec.tenant, session, request.policy.name
