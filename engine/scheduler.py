"""Decides what each step computes. There is no prefill phase and no decode phase.

Every running request has tokens whose KV is missing; a step computes some of them for as many
requests as the budget allows: one for a request that decodes, a chunk for one that does not.
Decodes come first, so that a long prompt never stalls the others' answers.

A step may be scheduled while the one before it is in flight. `advance` then has taken in what a
launch already settles, and `update` takes in the rest when the result is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace

from relaykv.engine.admission import Admission
from relaykv.engine.batch import ModelRunnerOutput, RelayCopy, ScheduledBatch, ScheduledRequest
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.config import SchedulerConfig
from relaykv.engine.prefix_cache import PrefixCache, approximation_salt, block_hash
from relaykv.engine.recording import RecordingStore
from relaykv.engine.request import FinishReason
from relaykv.engine.request_state import HeldObservation, Request, RequestStatus


class Scheduler:
    """Holds all unfinished requests and the memory they compete for."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        recordings: RecordingStore,
        admission: Admission,
    ) -> None:
        self._config = config
        self._num_layers = num_layers
        self._block_size = block_size
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._recordings = recordings
        self._admission = admission
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._observations: list[HeldObservation] = []  # of prefills that are over
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished; observations are not counted."""
        return bool(self._waiting or self._running)

    @property
    def has_observations(self) -> bool:
        return bool(self._observations)

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def running(self) -> list[Request]:
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: a request of this id is unfinished.
        """
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use")
        self._requests[request.id] = request
        self._waiting.append(request)

    def schedule(self, max_tokens: int | None = None) -> ScheduledBatch:
        """Chooses the rows of the next step and makes room for them.

        Args:
            max_tokens: of a step that is to be shorter than others.

        The batch is empty when there is nothing to do before the step in flight is over.
        """
        budget = float(max_tokens or self._config.max_num_batched_tokens)
        scheduled: list[ScheduledRequest] = []
        max_len = self._config.max_model_len
        decoding = [r for r in self._running if not (r.is_prefilling or r.has_all_tokens(max_len))]
        if self._must_wait(decoding):
            return ScheduledBatch((), ())
        for request in decoding:
            if request.status is RequestStatus.RUNNING and self._grow(request):
                scheduled.append(request.part(request.num_tokens))
                budget -= 1
        for request in [r for r in self._running if r.is_prefilling]:
            if request.status is RequestStatus.RUNNING:
                budget -= self._schedule_chunk(request, budget, scheduled)
        copies: list[RelayCopy] = []
        while self._waiting and budget >= 1 and self.num_running < self._config.max_num_requests:
            request = self._waiting[0]
            admitted = self._admission.admit(request)
            if admitted is None:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            copies.extend(admitted)
            budget -= self._schedule_chunk(request, budget, scheduled)
        return ScheduledBatch(tuple(scheduled), tuple(copies))

    def advance(self, batch: ScheduledBatch) -> None:
        """Takes in that a step was launched, so that the next one can be scheduled behind it.

        Blocks that are let go here or by a request that ends may be written by the next step at
        once, although this one may still be going to read or write them: the device carries out
        everything in the order of launching.
        """
        for part in batch.requests:
            request = self[part.request_id]
            self._pool.release(request.source_blocks)
            request.source_blocks.clear()
            request.num_computed_tokens = part.stop
            if part.sampling is not None:
                request.num_awaited_tokens += 1

    def update(
        self, batch: ScheduledBatch, output: ModelRunnerOutput, ended: Collection[str]
    ) -> None:
        """Takes in what a launched step computed: reusable blocks, sampled tokens.

        Blocks get their names here and not at the launch, because a step may fail.

        Args:
            batch: without the requests that have ended since.
            ended: requests whose sampled token ends the answer and is not part of it.
        """
        for part in batch.requests:
            request = self[part.request_id]
            request.num_collected_tokens = part.stop
            self._register_blocks(request)
            count = output.recomputed.get(request.id)
            if count is not None and request.plan is request.first_plan:
                request.num_relay_layer_tokens += count.num_layer_tokens
                request.recomputed.update(count.offsets)
            token = output.sampled.get(request.id)
            if token is not None:
                request.plan = None
                request.num_awaited_tokens -= 1
                if token.error is None:
                    self._keep_observations(request)
                if request.id not in ended:
                    request.token_ids.append(token.token_id)

    def take_observations(self) -> list[HeldObservation]:
        """What there is to learn from segments whose KV is complete. Their blocks stay held."""
        taken, self._observations = self._observations, []
        return taken

    def release_observations(self, taken: Iterable[HeldObservation]) -> None:
        """Lets go of the blocks of observations whose device work was launched, or never will."""
        for observation in taken:
            self._pool.release(observation.blocks)

    def finish(self, request_id: str, reason: FinishReason, num_visible_tokens: int) -> None:
        """Ends a request, at whatever point it is, and records it for its session.

        Args:
            num_visible_tokens: tokens of the answer that the client was sent; an aborted
                request is recorded only so far, and not at all while its prompt was computed.
        """
        request = self._requests.pop(request_id)
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            # What a step in flight computes for it is not part of the answer.
            num_tokens = request.num_collected_tokens
            if reason is FinishReason.ABORT:
                num_tokens = min(num_tokens, request.num_prompt_tokens + num_visible_tokens)
            if reason is not FinishReason.ERROR and num_tokens >= request.num_prompt_tokens:
                self._record(request, num_tokens)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._free(request)

    def _schedule_chunk(
        self, request: Request, budget: float, scheduled: list[ScheduledRequest]
    ) -> float:
        """Adds as much of a prefill as the budget allows; returns what it is expected to cost."""
        plan = request.plan
        assert plan is not None
        start = request.num_computed_tokens
        full_budget = self._config.max_num_batched_tokens
        stop = plan.chunk_stop(start, int(budget), full_budget, self._num_layers)
        if stop > start:
            part = request.part(stop)
            scheduled.append(part)
            spared = (s.num_tokens * (1 - s.cost(self._num_layers)) for s in part.relay_spans)
            return stop - start - sum(spared)
        return 0.0

    def _must_wait(self, decoding: list[Request]) -> bool:
        """Whether the step in flight has to be over before another one is scheduled.

        It has to when the host needs a token that is still being sampled, and when a request
        would have to be preempted, because a step in flight may be computing for it. The whole
        step waits: leaving single requests out of it would halve their rate.
        """
        if not any(request.is_in_flight for request in self._running):
            return False
        if any(r.num_awaited_tokens and r.samples_by_known_tokens for r in decoding):
            return True
        num_new_blocks = sum(not self._has_slot(request) for request in decoding)
        return not self._admission.make_room(num_new_blocks)

    def _has_slot(self, request: Request) -> bool:
        return request.num_tokens <= len(request.blocks) * self._block_size

    def _grow(self, request: Request) -> bool:
        """Makes sure the next token of a decoding request has a slot.

        Takes idle blocks, then recordings, oldest first, then preempts the newest request,
        which this step cannot have scheduled yet. Returns False when it was the request itself.
        """
        if self._has_slot(request):
            return True
        while not self._admission.make_room(1):
            newest = self._running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        request.blocks.extend(self._pool.allocate(1))
        return True

    def _preempt(self, request: Request) -> None:
        """Sends a request back to the head of the queue; its KV will be computed again."""
        self._running.remove(request)
        self._free(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_collected_tokens = 0
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _keep_observations(self, request: Request) -> None:
        """Keeps what its finished prefill teaches, whatever becomes of the request itself."""
        for observation in request.observations:
            copy = observation.copy
            last = (copy.start + copy.num_tokens - 1) // self._block_size
            own = tuple(request.blocks[copy.start // self._block_size : last + 1])
            self._pool.hold(own)
            self._observations.append(replace(observation, blocks=(*observation.blocks, *own)))
        request.observations.clear()

    def _free(self, request: Request) -> None:
        for observation in request.observations:
            self._pool.release(observation.blocks)
        request.observations.clear()
        self._pool.release(request.source_blocks)
        self._pool.release(request.blocks)
        request.source_blocks.clear()
        request.blocks.clear()
        request.block_hashes.clear()
        request.plan = None

    def _register_blocks(self, request: Request) -> None:
        """Names the blocks that became full, so that later prompts can hit them."""
        size = self._block_size
        for index in range(len(request.block_hashes), request.num_collected_tokens // size):
            parent = (
                request.block_hashes[-1] if index else self._prefix_cache.root(request.spec.tenant)
            )
            stop = (index + 1) * size
            salt = b""
            if request.approximate_from is not None and stop > request.approximate_from:
                key = request.session_key
                assert key is not None
                salt = approximation_salt(key.tenant, key.session, request.policy.name)
            name = block_hash(parent, request.token_ids[stop - size : stop], salt)
            request.block_hashes.append(name)
            self._prefix_cache.register(request.blocks[index], name)

    def _record(self, request: Request, num_tokens: int) -> None:
        key = request.session_key
        if key is None or not request.spec.relay.store:
            return
        num_blocks = -(-num_tokens // self._block_size)
        self._recordings.add(
            request.id,
            key,
            tuple(request.token_ids[:num_tokens]),
            request.blocks[:num_blocks],
            request.num_prompt_tokens,
            request.taint,
            request.spec.relay.agent_class,
            request.spec.relay.question,
        )
