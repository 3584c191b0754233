"""One request while it is being served. Only the scheduler changes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from relaykv.engine.batch import UNKNOWN_TOKEN, RelayCopy, SamplingRow, ScheduledRequest
from relaykv.engine.block_pool import Block
from relaykv.engine.handoff_slots import HandoffKey
from relaykv.engine.policy import Policy
from relaykv.engine.prefill_plan import PrefillPlan, SpanKind
from relaykv.engine.provenance import prompt_runs
from relaykv.engine.recording import SessionKey
from relaykv.engine.relay_report import (
    PromptRun,
    RelayReport,
    RunKind,
    RunSource,
    SegmentReport,
)
from relaykv.engine.request import FinishReason, GenerateRequest, Usage


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never ran, or was preempted and starts over
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """Where a segment came from, kept after its recording may be gone."""

    start: int  # of the segment in the prompt
    stop: int
    request_id: str
    source_start: int
    policy: str  # that serves it; "full": it is computed
    why: str | None = None


@dataclass(frozen=True, slots=True)
class HeldObservation:
    """What there is to learn from a segment, and the blocks that are kept until it is learned."""

    key: HandoffKey
    copy: RelayCopy
    blocks: tuple[Block, ...]  # those of its recording first
    anchor_token_ids: tuple[int, ...] | None = None  # when it becomes an anchor; None: it teaches


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: its tokens, the blocks that hold their KV, and how far it has come.

    A step in flight is one that was launched and whose result is not there yet.
    """

    spec: GenerateRequest
    policy: Policy
    seed: int  # of its random numbers; fixed for its whole life
    token_ids: list[int]  # prompt, then the answer as far as it is known
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_awaited_tokens: int = 0  # behind `token_ids`: steps in flight are sampling them
    num_computed_tokens: int = (
        0  # from the start, all have KV in `blocks` once nothing is in flight
    )
    num_collected_tokens: int = 0  # of these, the ones whose steps are over
    blocks: list[Block] = field(default_factory=list)  # in sequence order
    block_hashes: list[bytes] = field(default_factory=list)  # of the full, collected blocks
    plan: PrefillPlan | None = None  # set while its prompt is being prefilled
    approximate_from: int | None = None  # first token whose KV is approximate
    taint: int = 0
    source_blocks: list[Block] = field(default_factory=list)  # held until the relay copy ran
    observations: list[HeldObservation] = field(default_factory=list)  # until the prefill is over
    # What the response reports; of the first admission, a preemption does not change it.
    first_plan: PrefillPlan | None = None
    sources: tuple[SegmentSource, ...] = ()  # of the plan's RELAY spans
    computed_sources: tuple[SegmentSource, ...] = ()  # of segments that were computed
    # Tokens of S, as offsets, by the start of what one step took of a span.
    recomputed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_relay_layer_tokens: int = 0  # layer-tokens computed for relayed spans
    refusal: str | None = None  # why nothing was relayed

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that steps may compute, those included that are still being sampled."""
        return len(self.token_ids) + self.num_awaited_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Known tokens of the answer."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def session_key(self) -> SessionKey | None:
        session = self.spec.relay.session
        return None if session is None else SessionKey(self.spec.tenant, session)

    @property
    def computes_all(self) -> bool:
        """True when logits of the whole prompt are needed, so that none of it may be reused."""
        return self.spec.sampling.num_prompt_logprobs is not None

    @property
    def is_in_flight(self) -> bool:
        """True while a step that computes some of its tokens is."""
        return self.num_collected_tokens < self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        no_answer = self.num_tokens == self.num_prompt_tokens
        return self.num_computed_tokens < self.num_tokens - 1 or no_answer

    @property
    def samples_by_known_tokens(self) -> bool:
        """True when its next token cannot be chosen before the one before it is known."""
        params = self.spec.sampling
        penalties = (params.frequency_penalty, params.presence_penalty)
        return params.grammar is not None or any(penalties) or params.repetition_penalty != 1

    def has_all_tokens(self, max_model_len: int) -> bool:
        """True when the last of its tokens, known or not, must be the last of the answer."""
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        at_limit = num_output_tokens >= self.spec.sampling.max_tokens
        return at_limit or self.num_tokens >= max_model_len

    def part(self, stop: int) -> ScheduledRequest:
        """What a step is to compute that takes the request from where it is to `stop`."""
        start = self.num_computed_tokens
        prompt = self.spec.prompt_token_ids
        sampling = None
        if stop == self.num_tokens:
            output = self._token_range(len(prompt), stop)
            sampling = SamplingRow(self.spec.sampling, self.seed, prompt, output, self.id)
        return ScheduledRequest(
            request_id=self.id,
            start=start,
            stop=stop,
            token_ids=self._token_range(start, stop),
            block_ids=tuple(block.id for block in self.blocks),
            relay_spans=tuple(self.plan.relay_spans(start, stop)) if self.plan else (),
            # What is not kept leaves no trace in blocks that it shares.
            counts_influence=(
                self.session_key is not None
                and self.spec.relay.store
                and self.num_tokens > len(prompt)
            ),
            sampling=sampling,
            scored_token_ids=prompt[start + 1 : stop + 1] if self.computes_all else (),
            num_top_logprobs=self.spec.sampling.num_prompt_logprobs or 0,
        )

    def usage(self) -> Usage:
        plan = self.first_plan
        cached = 0
        if plan is not None:
            recomputed = sum(map(len, self.recomputed.values()))
            cached = plan.count(SpanKind.PREFIX) + plan.count(SpanKind.RELAY) - recomputed
        return Usage(self.num_prompt_tokens, self.num_output_tokens, cached)

    def report(self, num_layers: int) -> RelayReport:
        """What relaying did for the prompt, in numbers."""
        plan = self.first_plan
        prefix = plan.count(SpanKind.PREFIX) if plan else 0
        relayed = plan.count(SpanKind.RELAY) if plan else 0
        recomputed = sum(map(len, self.recomputed.values()))
        explain = self.spec.relay.explain
        return RelayReport(
            session=self.spec.relay.session,
            policy=self.policy.name,
            num_prefix_tokens=prefix,
            num_relayed_tokens=relayed - recomputed,
            num_recomputed_tokens=recomputed,
            num_computed_tokens=self.num_prompt_tokens - prefix - relayed,
            recomputed_share=self.num_relay_layer_tokens / (relayed * num_layers) if relayed else 0,
            segments=self._segments() if explain else (),
            runs=self._runs() if explain else (),
            reason=self.refusal if self.spec.relay.session is not None else None,
        )

    def _token_range(self, start: int, stop: int) -> tuple[int, ...]:
        known = self.token_ids[start:stop]
        return (*known, *(UNKNOWN_TOKEN,) * (stop - start - len(known)))

    def _segments(self) -> tuple[SegmentReport, ...]:
        sources = sorted((*self.sources, *self.computed_sources), key=lambda s: s.start)
        return tuple(
            SegmentReport(
                s.start,
                s.stop,
                s.request_id,
                s.source_start,
                self._recomputed_in(s),
                s.policy,
                s.why,
            )
            for s in sources
        )

    def _recomputed_in(self, source: SegmentSource) -> int:
        # A long span is relayed in several chunks, each counted under its own start.
        starts = range(source.start, source.stop)
        return sum(len(offsets) for start, offsets in self.recomputed.items() if start in starts)

    def _runs(self) -> tuple[PromptRun, ...]:
        if self.first_plan is None:
            return (PromptRun(RunKind.COMPUTED, 0, self.num_prompt_tokens),)
        sources = [RunSource(s.request_id, s.source_start) for s in self.sources]
        return prompt_runs(self.first_plan, sources, self.recomputed)
