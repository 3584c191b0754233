"""Chooses segment by segment whether one is relayed, and under which policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.anchor_gate import AnchorGate, Handoff
from relaykv.engine.anchor_pools import AnchorVerdict
from relaykv.engine.handoff_slots import HandoffKey, HandoffSlots, Verdict
from relaykv.engine.policy import Placement, Policy
from relaykv.engine.recording import RecordingStore, agent_class
from relaykv.engine.request_state import Request
from relaykv.engine.segment import Segment

_NUM_GLUE_TOKENS = 16
# Two may be a text and its revision.
_MIN_CANDIDATES = 3
_CANDIDATES = "computed because several answers to one question are compared here"
_ALL = "the policy computes everything"
_OBSERVE = Verdict(None, True, _ALL)
_DUE = "computed because it is due to be observed"
_FOR_ANOTHER = "computed because a segment behind it is due to be observed"


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """What is to happen to a segment."""

    segment: Segment
    policy: Policy | None  # that it is relayed under; None: it is computed
    why: str | None = None
    key: HandoffKey | None = None  # of a policy that learns
    offset_index: int | None = None  # of the mean that corrects it
    observe: bool = False  # how its KV differs from the recording's
    verdict: AnchorVerdict | None = None  # of a policy that keeps anchors


class SegmentChooser:
    """Asks the table of hand-offs where a policy learns, the gate where it keeps anchors."""

    def __init__(
        self,
        recordings: RecordingStore,
        handoffs: HandoffSlots | None = None,
        anchors: AnchorGate | None = None,
    ) -> None:
        """Without them nothing is learned and no anchor kept: every kind stays unknown."""
        self._recordings = recordings
        self._handoffs = handoffs
        self._anchors = anchors

    def choose(
        self, request: Request, segments: Sequence[Segment], may_teach: bool
    ) -> list[SegmentChoice]:
        """Decides on the segments of a request, in order.

        A segment teaches only behind exact KV, and only when its recording is exact: else means
        of different things would be mixed. When one is due, those before it are computed with it.

        Args:
            segments: clipped to what is going to be relayed.
            may_teach: whether the prefix hit in front of them is exact, and the request new.
        """
        policy = request.policy
        if policy.placement is Placement.SHIFT:
            return [SegmentChoice(segment, policy) for segment in segments]
        if policy.exact_choices and self._num_candidates(segments) >= _MIN_CANDIDATES:
            return [SegmentChoice(segment, None, _CANDIDATES) for segment in segments]
        receiver = agent_class(request.spec.relay.agent_class, request.spec.prompt_token_ids)
        keys = [self._key(request, segment, receiver) for segment in segments]
        if policy.placement is Placement.ANCHORS:
            return self._choose_by_anchors(request, segments, keys)
        verdicts = [_OBSERVE if policy.observes else self._judge(key) for key in keys]
        can_teach = [self._recordings[segment.recording_id].taint == 0 for segment in segments]
        due = [i for i, v in enumerate(verdicts) if may_teach and v.is_due and can_teach[i]]
        num_computed = due[-1] + 1 if due else 0
        due_why, other_why = (_ALL, _ALL) if policy.observes else (_DUE, _FOR_ANOTHER)
        choices = []
        for index, (segment, key, verdict) in enumerate(zip(segments, keys, verdicts, strict=True)):
            if index < num_computed:
                why = due_why if index in due else other_why
                choice = SegmentChoice(segment, None, why, key)
            elif verdict.offset_index is not None:
                warm = policy.warm or policy
                choice = SegmentChoice(segment, warm, verdict.why, key, verdict.offset_index)
            else:
                choice = SegmentChoice(segment, policy.cold, verdict.why, key)
            if choice.policy is not None:
                may_teach = False
            elif may_teach and can_teach[index]:
                choice = SegmentChoice(segment, None, choice.why, key, observe=True)
            choices.append(choice)
        return choices

    def count(self, choices: Sequence[SegmentChoice]) -> None:
        """Takes in that a request with these choices is going to be served."""
        for choice in choices:
            if choice.key is None:
                continue
            if choice.verdict is not None:
                if self._anchors is not None:
                    self._anchors.pools.meet(choice.key, choice.verdict)
            elif self._handoffs is not None:
                self._handoffs.count(choice.key)

    def _choose_by_anchors(
        self, request: Request, segments: Sequence[Segment], keys: Sequence[HandoffKey]
    ) -> list[SegmentChoice]:
        """Every refused segment becomes an anchor, whatever stands before it.

        Others may be relayed before it, as they may when it serves; were they computed with it, as
        they are for a mean, a prompt of many segments would rarely be relayed. Its recording need
        not be exact: whatever that lacks is part of the offset.
        """
        policy = request.policy
        if self._anchors is None:
            why = "this engine keeps no anchors"
            return [SegmentChoice(segment, None, why) for segment in segments]
        tokens = request.token_ids
        handoffs = [
            Handoff(
                key,
                tuple(tokens[segment.start : segment.stop]),
                tuple(block.id for block in self._recordings[segment.recording_id].blocks),
                segment.source_start,
            )
            for segment, key in zip(segments, keys, strict=True)
        ]
        # One that was preempted has its answer in front of it, which no other prompt has.
        is_new = not request.num_output_tokens
        return [
            SegmentChoice(
                segment,
                policy if verdict.anchors else policy.cold,
                verdict.why,
                key,
                observe=is_new and not verdict.anchors,
                verdict=verdict,
            )
            for segment, key, verdict in zip(
                segments, keys, self._anchors.judge(handoffs), strict=True
            )
        ]

    def _num_candidates(self, segments: Sequence[Segment]) -> int:
        """The most answers to one question that are among the segments."""
        recordings = {segment.recording_id for segment in segments}
        questions = (self._recordings[recording_id].question for recording_id in recordings)
        asked = Counter(question for question in questions if question)
        return max(asked.values(), default=0)

    def _judge(self, key: HandoffKey) -> Verdict:
        if self._handoffs is None:
            return Verdict(None, False, "this engine learns nothing")
        return self._handoffs.judge(key)

    def _key(self, request: Request, segment: Segment, receiver: str) -> HandoffKey:
        start = segment.start
        glue = tuple(request.token_ids[max(start - _NUM_GLUE_TOKENS, 0) : start])
        producer = self._recordings[segment.recording_id].agent_class
        return HandoffKey(request.spec.tenant, receiver, glue, producer)
