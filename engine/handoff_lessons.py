"""Lets the table of hand-offs and the means on the device learn from computed segments.

And makes anchors of those that the anchors' gate has refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.anchor_pools import Anchor, AnchorPools
from relaykv.engine.batch import AnchorRecord, Observation, PendingErrors
from relaykv.engine.handoff_slots import HandoffKey, HandoffSlots, Trial
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.request_state import HeldObservation
from relaykv.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    trials: tuple[Trial, ...]  # one per observation
    errors: PendingErrors


class HandoffLessons:
    """Carries observations from the scheduler to the device, and their errors to the table.

    Nothing waits for them: an observation is launched once the first token of its request is out,
    and its errors are read before the next one is launched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        handoffs: HandoffSlots | None,
        anchors: AnchorPools | None,
    ) -> None:
        """What there is no table or no pools for is dropped."""
        self._scheduler = scheduler
        self._runner = runner
        self._handoffs = handoffs
        self._anchors = anchors
        self._launched: _Launched | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_observations or self._launched is not None

    def learn(self) -> None:
        """Takes in what was launched, and launches what there is.

        A failure costs what was to be learned and nothing else.
        """
        try:
            self._collect()
        except Exception:
            _log.exception("errors of observed hand-offs are lost")
        held = self._scheduler.take_observations()
        try:
            self._observe([one for one in held if one.anchor_token_ids is None])
            self._add_anchors([one for one in held if one.anchor_token_ids is not None])
        except Exception:
            _log.exception("observations of hand-offs failed and are dropped")
        finally:
            self._scheduler.release_observations(held)

    def _collect(self) -> None:
        launched, self._launched = self._launched, None
        if launched is None or self._handoffs is None:
            return
        for trial, errors in zip(launched.trials, launched.errors.result(), strict=True):
            self._handoffs.take(trial, errors)

    def _observe(self, held: Sequence[HeldObservation]) -> None:
        handoffs = self._handoffs
        if not held or handoffs is None:
            return
        trials = tuple(handoffs.observe(observation.key) for observation in held)
        pairs = zip(held, trials, strict=True)
        observations = [Observation(one.copy, trial.lessons) for one, trial in pairs]
        try:
            errors = self._runner.observe(observations)
        except Exception:
            for observation in held:  # nobody knows what their means are now
                handoffs.forget(observation.key)
            raise
        self._launched = _Launched(trials, errors)

    def _add_anchors(self, held: Sequence[HeldObservation]) -> None:
        pools = self._anchors
        if not held or pools is None:
            return
        added: list[tuple[HandoffKey, Anchor]] = []
        records: list[AnchorRecord] = []
        for observation in held:
            anchor = pools.add(
                observation.key,
                observation.anchor_token_ids or (),
                observation.blocks,
                observation.copy.source_start,
            )
            if anchor is not None:
                added.append((observation.key, anchor))
                records.append(AnchorRecord(observation.copy, anchor.place))
        if not records:
            return
        try:
            self._runner.store_anchors(records)
        except Exception:
            for key, anchor in added:  # nobody knows what their offsets are
                pools.forget(key, anchor)
            raise
