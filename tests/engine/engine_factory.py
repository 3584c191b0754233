"""Small values of the engine's pure ring, and an engine whose runner is plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from fake_runner import FakeRunner, next_token

from relaykv.engine.admission import Admission
from relaykv.engine.anchor_gate import AnchorGate
from relaykv.engine.anchor_pools import AnchorPools
from relaykv.engine.batch import ScheduledBatch
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.config import SchedulerConfig
from relaykv.engine.handoff_lessons import HandoffLessons
from relaykv.engine.handoff_slots import HandoffSlots
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.policy import Bands, Policy, builtin_policies
from relaykv.engine.prefix_cache import PrefixCache
from relaykv.engine.recording import Recording, RecordingStore
from relaykv.engine.request import FinishReason, GenerateRequest, RelayOptions, SamplingParams
from relaykv.engine.request_state import Request, RequestStatus
from relaykv.engine.scheduler import Scheduler

NUM_LAYERS = 8
POLICIES = builtin_policies(NUM_LAYERS, Bands(1, 3, 6))


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Everything small, so that borders and shortages are met often."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_batched_tokens: int = 32
    max_num_requests: int = 8
    min_segment_tokens: int = 8
    num_offsets: int = 12
    anchor_share: float = 0.5

    @property
    def max_model_len(self) -> int:
        return self.num_blocks * self.block_size


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    session: str | None = None,
    policy: str = "shift",
    tenant: str = "",
    store: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    explain: bool = False,
    agent_class: str = "",
) -> Request:
    """A waiting request; without a session its policy is `full`, as the core decides."""
    spec = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        relay=RelayOptions(session, policy, store, explain, agent_class),
        tenant=tenant,
    )
    chosen: Policy = POLICIES["full" if session is None else policy]
    return Request(spec=spec, policy=chosen, seed=0, token_ids=list(prompt))


def expected_answer(request: Request, max_model_len: int) -> list[int]:
    """What an engine with a fresh cache and nobody else to serve would answer."""
    token_ids = list(request.spec.prompt_token_ids)
    answer: list[int] = []
    while len(answer) < request.spec.sampling.max_tokens and len(token_ids) < max_model_len:
        token = next_token(token_ids)
        if token in request.spec.sampling.stop_token_ids:
            break
        token_ids.append(token)
        answer.append(token)
    return answer


@dataclass(slots=True)
class FakeEngine:
    """The pure ring around a `FakeRunner`, stepped like the core does; checks itself."""

    sizes: EngineSizes = field(default_factory=EngineSizes)
    deferred: bool = False  # whether the runner computes a step only when it is collected
    pool: BlockPool = field(init=False)
    prefix_cache: PrefixCache = field(init=False)
    recordings: RecordingStore = field(init=False)
    admission: Admission = field(init=False)
    scheduler: Scheduler = field(init=False)
    handoffs: HandoffSlots = field(init=False)
    anchors: AnchorPools = field(init=False)
    lessons: HandoffLessons = field(init=False)
    runner: FakeRunner = field(init=False)
    finished: dict[str, Request] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.pool = BlockPool(sizes.num_blocks)
        self.prefix_cache = PrefixCache(self.pool, sizes.block_size, "model")
        self.recordings = RecordingStore(self.pool, sizes.min_segment_tokens)
        self.handoffs = HandoffSlots(sizes.num_offsets)
        max_anchor_blocks = int(sizes.anchor_share * sizes.num_blocks)
        self.anchors = AnchorPools(self.pool, self.recordings, sizes.block_size, max_anchor_blocks)
        self.runner = FakeRunner(
            sizes.block_size, lambda i: self.scheduler[i], self.pool, self.deferred
        )
        self.admission = Admission(
            self.pool,
            self.prefix_cache,
            self.recordings,
            sizes.block_size,
            sizes.min_segment_tokens,
            self.handoffs,
            AnchorGate(self.anchors, self.runner, 0.3, 2),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                sizes.max_num_batched_tokens, sizes.max_num_requests, sizes.max_model_len
            ),
            NUM_LAYERS,
            sizes.block_size,
            self.pool,
            self.prefix_cache,
            self.recordings,
            self.admission,
        )
        runner = cast(ModelRunner, self.runner)
        self.lessons = HandoffLessons(self.scheduler, runner, self.handoffs, self.anchors)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.waiting[request.id] = request
        return request

    def abort(self, request_id: str, num_visible_tokens: int | None = None) -> None:
        request = self.scheduler[request_id]
        visible = request.num_output_tokens if num_visible_tokens is None else num_visible_tokens
        self._finish(request, FinishReason.ABORT, visible)
        self.check()

    def step(self) -> ScheduledBatch:
        """One round. Fails when work is left but nothing was scheduled."""
        had_work = self.scheduler.has_work
        self.lessons.learn()
        batch = self.scheduler.schedule()
        self.check()
        assert bool(batch.requests) == had_work, "a step without progress"
        step = self.runner.launch(batch)
        self.scheduler.advance(batch)
        output = step.result()
        ended = {
            request_id
            for request_id, token in output.sampled.items()
            if token.token_id in self.scheduler[request_id].spec.sampling.stop_token_ids
        }
        self.scheduler.update(batch, output, ended)
        for request_id in output.sampled:
            request = self.scheduler[request_id]
            if request_id in ended:
                self._finish(request, FinishReason.STOP, request.num_output_tokens)
            elif (
                request.num_output_tokens >= request.spec.sampling.max_tokens
                or len(request.token_ids) >= self.sizes.max_model_len
            ):
                self._finish(request, FinishReason.LENGTH, request.num_output_tokens)
        self.check()
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work or self.lessons.has_work):
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def serve(self, request: Request) -> Request:
        """Adds a request and runs until all are done."""
        self.add(request)
        self.run()
        return request

    def check(self) -> None:
        """Holds what the pool believes against who really holds its blocks."""
        counts = self.pool.counts()
        total = counts.free + counts.cached + counts.recorded + counts.used
        assert total == self.pool.num_blocks
        assert counts.free + counts.cached == self.pool.num_idle
        holders: Counter[int] = Counter()
        for request in self.scheduler.running():
            holders.update(block.id for block in request.blocks)
            holders.update(block.id for block in request.source_blocks)
            for observation in request.observations:
                holders.update(block.id for block in observation.blocks)
            capacity = len(request.blocks) * self.sizes.block_size
            assert request.num_collected_tokens <= request.num_computed_tokens <= capacity
        for request in self.scheduler._waiting:
            assert not request.blocks
            assert not request.source_blocks
            assert not request.observations
            assert request.num_computed_tokens == request.num_collected_tokens == 0
            assert request.num_awaited_tokens == 0
        for observation in self.scheduler._observations:
            holders.update(block.id for block in observation.blocks)
        recorded: Counter[int] = Counter()
        for recording in self.all_recordings():
            recorded.update(block.id for block in recording.blocks)
        anchors = [a for pool in self.anchors._pools.values() for a in pool.uses]
        for anchor in anchors:
            recorded.update(block.id for block in anchor.blocks)
        assert self.anchors.num_blocks == len({b.id for a in anchors for b in a.blocks})
        assert self.anchors.num_blocks <= int(self.sizes.anchor_share * self.sizes.num_blocks)
        for block in self.pool._blocks:
            assert block.num_requests == holders[block.id]
            assert block.num_recordings == recorded[block.id]
            assert (block.id in self.pool._idle) == block.is_idle
        named = {block.hash: block for block in self.pool._blocks if block.hash is not None}
        assert named == self.prefix_cache._by_hash

    def all_recordings(self) -> list[Recording]:
        return list(self.recordings._recordings.values())

    def _finish(self, request: Request, reason: FinishReason, num_visible: int) -> None:
        self.scheduler.finish(request.id, reason, num_visible)
        del self.waiting[request.id]
        self.finished[request.id] = request


def assert_answered(engine: FakeEngine, *requests: Request) -> None:
    """Every request has ended with the answer of an engine of its own."""
    for request in requests:
        expected = expected_answer(request, engine.sizes.max_model_len)
        assert list(request.output_token_ids) == expected
        assert request.status is RequestStatus.FINISHED
