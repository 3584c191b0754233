"""A model runner without a model, which knows what every slot of the cache ought to hold."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaykv.engine.batch import (
    ModelRunnerOutput,
    RecomputeCount,
    RelayCopy,
    SampledToken,
    ScheduledBatch,
    ScheduledRequest,
)
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.request_state import Request

VOCAB_SIZE = 1000


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


class FakeRunner:
    """Answers deterministically; fails as soon as a request would read another's KV."""

    def __init__(
        self, block_size: int, request_of: Callable[[str], Request], pool: BlockPool
    ) -> None:
        self._block_size = block_size
        self._request_of = request_of
        self._pool = pool
        self._slots: dict[int, SlotContent] = {}
        self.num_copied_tokens = 0

    def execute(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        assert len({part.request_id for part in batch.requests}) == len(batch.requests)
        by_blocks = {part.block_ids: part for part in batch.requests}
        for copy in batch.copies:
            self._copy(copy, by_blocks[copy.block_ids])
        for part in batch.requests:
            self._check_past(part)
        for part in batch.requests:
            self._compute(part)
        for part in batch.requests:  # nobody wrote over another's rows
            self._check_range(part, 0, part.stop)
        sampled = {
            part.request_id: SampledToken(self._sample(part), None)
            for part in batch.requests
            if part.sampling is not None
        }
        recomputed = {
            part.request_id: RecomputeCount(
                {span.start: min(3, span.num_tokens) for span in part.relay_spans},
                3 * len(part.relay_spans),
            )
            for part in batch.requests
            if part.relay_spans and part.policy.bands is not None
        }
        return ModelRunnerOutput(sampled, recomputed)

    def _copy(self, copy: RelayCopy, part: ScheduledRequest) -> None:
        request = self._request_of(part.request_id)
        self._check_writable(request, copy.start, copy.start + copy.num_tokens)
        for offset in range(copy.num_tokens):
            position = copy.start + offset
            source = self._slots[self._slot(copy.source_block_ids, copy.source_start + offset)]
            assert source.position == copy.source_start + offset == position - copy.shift
            assert source.token_id == request.token_ids[position]
            assert source.tenant == request.spec.tenant
            if source.approximation is not None:
                assert source.approximation[:2] == (request.spec.tenant, request.spec.relay.session)
            self._slots[self._slot(copy.block_ids, position)] = replace(
                source, position=position, approximation=_reader(request)
            )
        self.num_copied_tokens += copy.num_tokens

    def _check_past(self, part: ScheduledRequest) -> None:
        """The KV of all earlier and all relayed tokens is there and may be read."""
        request = self._request_of(part.request_id)
        assert part.start == request.num_computed_tokens
        assert part.token_ids == tuple(request.token_ids[part.start : part.stop])
        assert part.block_ids == tuple(block.id for block in request.blocks)
        self._check_range(part, 0, part.start)
        for span in part.relay_spans:
            assert part.start <= span.start < span.stop <= part.stop
            self._check_range(part, span.start, span.stop)

    def _check_range(self, part: ScheduledRequest, start: int, stop: int) -> None:
        request = self._request_of(part.request_id)
        for position in range(start, stop):
            slot = self._slots[self._slot(part.block_ids, position)]
            assert slot.token_id == request.token_ids[position], "the KV of another token"
            assert slot.position == position, "the KV of another position"
            assert slot.tenant == request.spec.tenant, "the KV of another tenant"
            assert slot.approximation in (None, _reader(request)), "approximate KV"

    def _compute(self, part: ScheduledRequest) -> None:
        request = self._request_of(part.request_id)
        self._check_writable(request, part.start, part.stop)
        relayed = {p for span in part.relay_spans for p in range(span.start, span.stop)}
        approximate = any(
            self._slots[self._slot(part.block_ids, position)].approximation is not None
            for position in range(part.start)
        )
        for position in range(part.start, part.stop):
            if position in relayed:
                approximate = True  # and so is all that attends to it
                continue
            self._slots[self._slot(part.block_ids, position)] = SlotContent(
                request.token_ids[position],
                position,
                request.spec.tenant,
                _reader(request) if approximate else None,
            )

    def _check_writable(self, request: Request, start: int, stop: int) -> None:
        """Blocks that are written belong to one request alone and are not named yet."""
        first, last = start // self._block_size, (stop - 1) // self._block_size
        for block in request.blocks[first : last + 1]:
            assert block.num_requests == 1
            assert block.num_recordings == 0
            assert block.hash is None

    def _sample(self, part: ScheduledRequest) -> int:
        assert part.sampling is not None
        row = part.sampling
        token_ids = [*row.prompt_token_ids, *row.output_token_ids]
        assert token_ids == self._request_of(part.request_id).token_ids
        assert part.stop == len(token_ids)
        return next_token(token_ids)

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        size = self._block_size
        return block_ids[position // size] * size + position % size


def _reader(request: Request) -> tuple[str, str, str] | None:
    session = request.spec.relay.session
    if session is None or not request.policy.relays:
        return None
    return request.spec.tenant, session, request.policy.name
