"""Computes a sample of relayed requests again in full, when the engine has nothing else to do.

A shadow run is a request of the engine's own. It is served step by step while nobody waits, and
taken back as soon as somebody does. Its answer is forced to be the relayed one, so that the
distributions at every position can be compared. It runs under the policy `observe`: what it
computes is exact, and policies that learn are taught by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from relaykv.engine.batch import ModelRunnerOutput, SampledToken, ScheduledBatch
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.policy import Policy
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RelayOptions,
    SamplingParams,
)
from relaykv.engine.request_state import Request
from relaykv.engine.scheduler import Scheduler
from relaykv.engine.shadow import NUM_POSITIONS, ShadowBook, ShadowJob, ShadowSampler

_log = logging.getLogger(__name__)

REQUEST_ID = " shadow"  # like no id that the server gives
NUM_STEP_TOKENS = 64  # of a step, which somebody who comes has to wait for


class ShadowRuns:
    """What the core tells of its requests, and the run that is going on."""

    def __init__(
        self,
        sampler: ShadowSampler,
        book: ShadowBook,
        runner: ModelRunner,
        scheduler: Scheduler,
        pool: BlockPool,
        block_size: int,
        policy_of: Callable[[GenerateRequest], Policy],
    ) -> None:
        self.book = book
        self._sampler = sampler
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._block_size = block_size
        self._policy_of = policy_of
        self._kept: dict[str, list[Tensor]] = {}  # by request id: of jobs that wait or run
        self._watched: set[str] = set()  # ids of requests that were chosen and run
        self._job: ShadowJob | None = None  # that runs

    @property
    def is_running(self) -> bool:
        return self._job is not None

    @property
    def has_work(self) -> bool:
        return self.is_running or self.book.num_waiting > 0

    def before_launch(self, requests: Sequence[Request], batch: ScheduledBatch) -> None:
        """Chooses among the requests whose first token a step is going to sample."""
        for request, part in zip(requests, batch.requests, strict=True):
            is_first = part.sampling is not None and not part.sampling.output_token_ids
            if not is_first or request.id == REQUEST_ID or request.id in self._watched:
                continue
            if request.approximate_from is not None and self._sampler.take():
                self._watched.add(request.id)
                self._runner.watch(request.id, NUM_POSITIONS)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Queues a chosen request that has ended, unless it was given up."""
        if request.id not in self._watched:
            return
        self._watched.remove(request.id)
        # To the host: a job may wait long, and the device's memory is planned without it.
        kept = [logits.cpu() for logits in self._runner.unwatch(request.id)]
        output = tuple(request.output_token_ids[:NUM_POSITIONS])
        kept = kept[: len(output)]  # not of tokens that are no part of the answer
        is_whole = reason not in (FinishReason.ABORT, FinishReason.ERROR)
        relay = request.spec.relay
        if not (is_whole and kept and relay.session is not None and len(kept) == len(output)):
            return
        self._kept[request.id] = kept
        dropped = self.book.add(
            ShadowJob(
                request.id,
                request.policy.name,
                request.spec.tenant,
                relay.session,
                relay.agent_class,
                request.spec.prompt_token_ids,
                output,
            )
        )
        if dropped is not None:
            self._kept.pop(dropped.request_id, None)

    def start(self) -> None:
        """Begins the next run, if there is one and blocks enough lie idle."""
        while self._job is None:
            job = self.book.next()
            if job is None:
                return
            num_tokens = len(job.prompt_token_ids) + len(job.output_token_ids)
            if self._pool.num_idle * self._block_size < num_tokens + self._block_size:
                self.book.num_dropped += 1  # nothing that is kept is worth less than this
                self._kept.pop(job.request_id, None)
                continue
            self._job = job
        spec = self._request(self._job)
        request = Request(spec, self._policy_of(spec), 0, list(spec.prompt_token_ids))
        self._scheduler.add(request)
        self._runner.watch(REQUEST_ID, NUM_POSITIONS)

    def interrupt(self) -> None:
        """Makes way for a request that has come; the run starts over later."""
        if self._job is not None:
            self.book.put_back(self._job)
            self._take_back()

    def give_up(self) -> None:
        """Drops the run: a step has failed, perhaps because of it."""
        if self._job is not None:
            self._kept.pop(self._job.request_id, None)
            self.book.num_dropped += 1
            self._take_back()

    def forced(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """What a step has sampled, with the relayed answer's token instead of the run's own."""
        if self._job is None or REQUEST_ID not in output.sampled:
            return output
        place = self._scheduler[REQUEST_ID].num_output_tokens
        token = SampledToken(self._job.output_token_ids[place], None)
        return replace(output, sampled={**output.sampled, REQUEST_ID: token})

    def advance(self) -> None:
        """Compares the two answers when the run has come to the end of its own."""
        job = self._job
        if job is None:
            return
        if self._scheduler[REQUEST_ID].num_output_tokens < len(job.output_token_ids):
            return
        self._job = None
        self._scheduler.finish(REQUEST_ID, FinishReason.LENGTH, 0)
        full = _log_probs([logits.cpu() for logits in self._runner.unwatch(REQUEST_ID)])
        relayed = _log_probs(self._kept.pop(job.request_id))
        kl = float(kl_divergence(full, relayed).mean())
        agreement = float((full.argmax(dim=-1) == relayed.argmax(dim=-1)).float().mean())
        given_up = self.book.note(job.policy, kl, agreement)
        if given_up is not None:
            _log.warning("%s", given_up)

    def _take_back(self) -> None:
        self._job = None
        self._runner.unwatch(REQUEST_ID)
        self._scheduler.finish(REQUEST_ID, FinishReason.ABORT, 0)

    def _request(self, job: ShadowJob) -> GenerateRequest:
        relay = RelayOptions(
            job.session,
            "observe",
            store=False,
            agent_class=job.agent_class,
            not_from=job.request_id,  # which has all of this prompt
        )
        sampling = SamplingParams(len(job.output_token_ids), temperature=0.0, ignore_eos=True)
        return GenerateRequest(REQUEST_ID, job.prompt_token_ids, sampling, relay, job.tenant)


def _log_probs(logits: Sequence[Tensor]) -> Tensor:
    """Fp32 [positions, vocab]."""
    return torch.stack(list(logits)).float().log_softmax(dim=-1)
