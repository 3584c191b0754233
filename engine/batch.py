"""The scheduler's decision for one step, in plain values, and what the runner answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relaykv.engine.prefill_plan import Span
from relaykv.engine.request import SamplingParams, TokenLogprob

# Stands in a step for the token that the step launched before it is still sampling.
UNKNOWN_TOKEN = -1


class PendingStep(Protocol):
    """A step that was launched and whose device work may still be going on."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step. Called once, in the order of launching.

        Raises:
            FloatingPointError: the logits of a row are not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What choosing one request's next token depends on."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # the last may be unknown, unless the choice depends on them
    request_id: str = ""  # nothing depends on it; a grammar's state is found again by it


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None  # when the request asked for log-probabilities
    error: str | None = None  # why this request cannot go on; the token means nothing then


@dataclass(frozen=True, slots=True)
class AnchorPlace:
    """Where an anchor stands in the cache: a text's values, and an offset for every token of it."""

    base_block_ids: tuple[int, ...]
    base_start: int  # position of the first token in the base's blocks
    offset_block_ids: tuple[int, ...]  # filled from their start


@dataclass(frozen=True, slots=True)
class AnchorQuery:
    """A recorded segment whose distances from anchors are asked for."""

    source_block_ids: tuple[int, ...]  # of the recording, in sequence order
    source_start: int  # position in the recording
    num_tokens: int
    anchors: tuple[AnchorPlace, ...]  # none shorter than the segment


@dataclass(frozen=True, slots=True)
class RelayCopy:
    """KV to be brought from a recording's slots into a request's own, keys turned by `shift`."""

    source_block_ids: tuple[int, ...]  # of the recording, in sequence order
    source_start: int  # position in the recording
    block_ids: tuple[int, ...]  # of the request, in sequence order
    start: int  # position in the prompt
    num_tokens: int
    offset_index: int | None = None  # of what is added to it all; None: nothing is
    anchors: tuple[AnchorPlace, ...] = ()  # whose offsets are added, weighted token by token

    @property
    def shift(self) -> int:
        return self.start - self.source_start


@dataclass(frozen=True, slots=True)
class Lesson:
    """A mean that an observation is to be taken into."""

    offset_index: int
    num_observations: int  # that are in it; with none, whatever the memory holds is replaced


@dataclass(frozen=True, slots=True)
class Observation:
    """A segment that was computed although a recording holds it.

    It shows what relaying would have lacked: its own KV less the recording's, had that been copied.
    """

    copy: RelayCopy
    lessons: tuple[Lesson, ...]


@dataclass(frozen=True, slots=True)
class HoldoutError:
    """What a mean would have left of an observation that it did not hold yet.

    Squared error of keys and of values after the correction, as a share of that before it.
    """

    keys: float
    values: float


@dataclass(frozen=True, slots=True)
class AnchorRecord:
    """A computed segment that becomes an anchor."""

    copy: RelayCopy  # from its recording to where it was computed; nothing is copied
    place: AnchorPlace


class PendingErrors(Protocol):
    """Observations that were launched and whose device work may still be going on."""

    def result(self) -> tuple[tuple[HoldoutError, ...], ...]:
        """Waits for them. One tuple per observation, one entry per lesson."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The part of one request that this step computes: positions [start, stop)."""

    request_id: str
    start: int
    stop: int
    token_ids: tuple[int, ...]  # at those positions; the last may be unknown
    block_ids: tuple[int, ...]  # of the whole request so far
    relay_spans: tuple[Span, ...]  # inside [start, stop), each with its policy
    counts_influence: bool  # decoding in a session: add up the attention its tokens receive
    sampling: SamplingRow | None  # set when the chunk reaches the end: its logits are sampled
    # Tokens of the prompt behind the chunk's positions, where their log-probabilities are wanted.
    scored_token_ids: tuple[int, ...] = ()
    num_top_logprobs: int = 0  # alternatives beside each of them


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Copies run before the first row that attends to them."""

    requests: tuple[ScheduledRequest, ...]
    copies: tuple[RelayCopy, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(request.stop - request.start for request in self.requests)


@dataclass(frozen=True, slots=True)
class RecomputeCount:
    """What repairing the relayed spans of one request took in one step."""

    offsets: Mapping[int, tuple[int, ...]]  # by span start: which of its tokens, sorted
    num_layer_tokens: int  # rows of relayed tokens over all layers


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step computed, by request id."""

    sampled: Mapping[str, SampledToken]
    recomputed: Mapping[str, RecomputeCount]
    scored: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # of prompts
