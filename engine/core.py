"""The engine without a thread: requests in, steps, outputs out.

With overlap a step is scheduled and launched while the one before it is still in flight, so that
the device never waits for the host. A request that turns out to have ended then has a row too many
in the later step; what that row computes is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relaykv.engine.anchor_pools import AnchorPools
from relaykv.engine.answer import Answer
from relaykv.engine.batch import ModelRunnerOutput, PendingStep, SampledToken, ScheduledBatch
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.client import EngineStats, RecordingInfo, SessionInfo
from relaykv.engine.config import RelayConfig
from relaykv.engine.detokenizer import Detokenizer
from relaykv.engine.handoff_lessons import HandoffLessons
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.policy import Policy, find_policy
from relaykv.engine.recording import RecordingStore, SessionKey
from relaykv.engine.request import FinishReason, GenerateRequest, RequestOutput
from relaykv.engine.request_state import Request, RequestStatus
from relaykv.engine.scheduler import Scheduler
from relaykv.engine.shadow import ShadowBook, ShadowSampler
from relaykv.engine.shadow_runs import NUM_STEP_TOKENS, ShadowRuns
from relaykv.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was launched and whose result has not been collected."""

    step: PendingStep
    batch: ScheduledBatch
    requests: tuple[Request, ...]  # one per part; an id alone may be in use again by now

    def unfinished(self) -> ScheduledBatch:
        """The batch without the requests that have ended since it was launched."""
        parts = zip(self.batch.requests, self.requests, strict=True)
        left = tuple(part for part, r in parts if r.status is not RequestStatus.FINISHED)
        return replace(self.batch, requests=left)


class EngineCore:
    """Holds everything of one engine. All methods but `prepare` belong to the engine thread.

    Attributes:
        runner, pool, recordings: the device, the blocks and what sessions have recorded; public
            for tools that measure, which read them between two steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        pool: BlockPool,
        recordings: RecordingStore,
        policies: Mapping[str, Policy],
        relay: RelayConfig,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        block_size: int,
        bytes_per_block: int,
        overlap: bool = False,
        lessons: HandoffLessons | None = None,
        anchors: AnchorPools | None = None,
    ) -> None:
        """With `overlap` one step is scheduled ahead; that pays where launching does not block."""
        self.runner = runner
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self.pool = pool
        self.recordings = recordings
        self._policies = policies
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._bytes_per_block = bytes_per_block
        self._num_ahead = 1 if overlap else 0
        self._in_flight: deque[_InFlight] = deque()  # in the order of launching
        self._answers: dict[str, Answer] = {}
        self._num_aborts = 0
        self._book = ShadowBook(relay.default_policy, relay.shadow_bound)
        sampler = ShadowSampler(relay.shadow_rate)
        self._shadow = ShadowRuns(
            sampler, self._book, runner, scheduler, pool, block_size, self._policy_of
        )
        self._lessons = lessons
        self._anchors = anchors

    @property
    def has_work(self) -> bool:
        learns = self._lessons is not None and self._lessons.has_work
        return self._scheduler.has_work or bool(self._in_flight) or learns or self._shadow.has_work

    def prepare(self, spec: GenerateRequest) -> None:
        """Does what a request needs and other requests should not wait for. For any thread.

        Raises:
            GrammarError: the request's grammar does not compile.
        """
        grammar, grammars = spec.sampling.grammar, self.runner.grammars
        if grammar is not None and grammars is not None:
            grammars.compile(grammar)

    def add(self, spec: GenerateRequest) -> None:
        """Takes a request in.

        Raises:
            ValueError: the prompt is empty or leaves no room for an answer, the policy is
                unknown, or the id is in use.
        """
        if not spec.prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        if len(spec.prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(spec.prompt_token_ids)} tokens, "
                f"the model takes {self._max_model_len} with the answer"
            )
        policy = self._policy_of(spec)
        self._shadow.interrupt()
        seed = spec.sampling.seed
        request = Request(
            spec=spec,
            policy=policy,
            seed=secrets.randbits(63) if seed is None else seed,
            token_ids=list(spec.prompt_token_ids),
        )
        self._scheduler.add(request)
        detokenizer = Detokenizer(self._tokenizer, spec.sampling.stop)
        self._answers[request.id] = Answer(detokenizer, self.runner.num_layers)

    def abort(self, request_id: str) -> None:
        """Ends a request whose caller has gone; unknown and finished ids are ignored."""
        if request_id in self._answers:
            answer = self._answers.pop(request_id)
            request = self._scheduler[request_id]
            self._scheduler.finish(request_id, FinishReason.ABORT, answer.num_tokens_sent)
            self._num_aborts += 1
            self._shadow.ended(request, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Schedules and launches a step, and collects the result of the oldest in flight.

        Without overlap that is the same step; with overlap it is the one before, if any. A step
        that raises ends the running requests with an error; waiting ones are served.
        """
        if self._lessons is not None:  # the callers have their tokens by now
            self._lessons.learn()
        if not (self._scheduler.has_work or self._in_flight):
            self._shadow.start()
        is_shadow = self._shadow.is_running
        batch = self._scheduler.schedule(NUM_STEP_TOKENS if is_shadow else None)
        if batch.requests:
            try:
                self._launch(batch)
            except Exception:
                return self._collect() + self._fail_running()
            # A shadow run's next token is not the one that is being sampled.
            if len(self._in_flight) <= self._num_ahead and not is_shadow:
                return []
        elif is_shadow:
            self._shadow.give_up()  # there are no blocks for it after all
        return self._collect()

    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        infos = []
        for key, recordings, last_used in self.recordings.sessions(tenant):
            num_blocks = len({block.id for r in recordings for block in r.blocks})
            infos.append(
                SessionInfo(
                    session=key.session,
                    recordings=tuple(
                        RecordingInfo(
                            r.request_id,
                            r.num_prompt_tokens,
                            len(r.token_ids) - r.num_prompt_tokens,
                            r.taint,
                        )
                        for r in recordings
                    ),
                    num_blocks=num_blocks,
                    num_bytes=num_blocks * self._bytes_per_block,
                    last_used=last_used,
                )
            )
        return tuple(infos)

    def delete_session(self, tenant: str, session: str) -> bool:
        return self.recordings.delete_session(SessionKey(tenant, session))

    def stats(self) -> EngineStats:
        blocks, anchors = self.pool.counts(), self._anchors
        return EngineStats(
            num_running=self._scheduler.num_running - self._shadow.is_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_recorded_blocks=blocks.recorded,
            num_used_blocks=blocks.used,
            num_total_blocks=self.pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_aborts=self._num_aborts,
            num_anchors=0 if anchors is None else anchors.num_anchors,
            num_anchor_bytes=0 if anchors is None else anchors.num_blocks * self._bytes_per_block,
            num_refused_anchors=0 if anchors is None else anchors.num_refused,
            default_policy=self._book.default_policy,
            shadows=self._book.summaries(),
            num_waiting_shadows=self._book.num_waiting,
            num_dropped_shadows=self._book.num_dropped,
        )

    def _policy_of(self, spec: GenerateRequest) -> Policy:
        name = spec.relay.policy
        if spec.relay.session is None:
            name = "full"  # nothing approximate ever happens without a session
        name = name or self._book.default_policy
        return find_policy(self._policies, name, self.runner.num_layers)

    def _launch(self, batch: ScheduledBatch) -> None:
        requests = tuple(self._scheduler[part.request_id] for part in batch.requests)
        self._shadow.before_launch(requests, batch)
        step = self.runner.launch(batch)
        self._scheduler.advance(batch)
        self._in_flight.append(_InFlight(step, batch, requests))

    def _collect(self) -> list[RequestOutput]:
        """Waits for the oldest step in flight, if there is one."""
        if not self._in_flight:
            return []
        oldest = self._in_flight.popleft()
        try:
            output = oldest.step.result()
        except Exception:
            return self._fail_running()
        return self._update(oldest.unfinished(), output)

    def _update(self, batch: ScheduledBatch, output: ModelRunnerOutput) -> list[RequestOutput]:
        output = self._shadow.forced(output)
        sampled = {
            part.request_id: output.sampled[part.request_id]
            for part in batch.requests
            if part.sampling is not None
        }
        ended = {i for i, token in sampled.items() if self._is_end(i, token)}
        self._scheduler.update(batch, output, ended)
        self._collect_prompt_logprobs(batch, output)
        outputs = []
        for request_id, token in sampled.items():
            if request_id not in self._answers:
                continue  # a shadow run's, which nobody is told
            request = self._scheduler[request_id]
            if token.error is not None:
                outputs.append(self._finish(request, FinishReason.ERROR, "", error=token.error))
            elif request_id in ended:
                text = self._answers[request_id].detokenizer.finish()
                outputs.append(self._finish(request, FinishReason.STOP, text))
            else:
                outputs.append(self._tell(request, token))
        self._shadow.advance()
        return outputs

    def _collect_prompt_logprobs(self, batch: ScheduledBatch, output: ModelRunnerOutput) -> None:
        for part in batch.requests:
            answer = self._answers.get(part.request_id)
            if answer is None:
                continue  # a shadow run's
            if part.start == 0:  # the first chunk, perhaps once more after a preemption
                answer.prompt_logprobs = ()
            answer.prompt_logprobs += output.scored.get(part.request_id, ())

    def _is_end(self, request_id: str, token: SampledToken) -> bool:
        params = self._scheduler[request_id].spec.sampling
        if token.error is not None or token.token_id in params.stop_token_ids:
            return True
        # Nothing but an end of turn can follow a grammar that is satisfied.
        goes_on = params.ignore_eos and params.grammar is None
        return token.token_id in self._eos_token_ids and not goes_on

    def _tell(self, request: Request, token: SampledToken) -> RequestOutput:
        """Turns a new token into text and finds out whether it is the last."""
        answer = self._answers[request.id]
        new = answer.detokenizer.push(token.token_id)
        if new.stopped is not None:
            return self._finish(request, FinishReason.STOP, new.text, token)
        at_limit = (
            request.num_output_tokens >= request.spec.sampling.max_tokens
            or len(request.token_ids) >= self._max_model_len
        )
        if at_limit:
            text = new.text + answer.detokenizer.finish()
            return self._finish(request, FinishReason.LENGTH, text, token)
        return answer.output(request, new.text, token)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        text: str,
        token: SampledToken | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        answer = self._answers.pop(request.id)
        output = answer.output(request, text, token, reason, error)
        self._scheduler.finish(request.id, reason, answer.num_tokens_sent)
        self._shadow.ended(request, reason)
        return output

    def _fail_running(self) -> list[RequestOutput]:
        """Ends the running requests, and with them all that is in flight. In an `except` only."""
        self._shadow.give_up()
        running = self._scheduler.running()
        _log.exception("a step failed; %d running requests end with an error", len(running))
        while self._in_flight:  # its requests are among them, and it may have read what failed
            with contextlib.suppress(Exception):
                self._in_flight.popleft().step.result()
        message = "the engine failed while it computed this request"
        return [self._finish(r, FinishReason.ERROR, "", error=message) for r in running]
