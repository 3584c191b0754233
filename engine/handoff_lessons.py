"""Lets the table of hand-offs and the means on the device learn from computed segments."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from relaykv.engine.batch import Observation, PendingErrors
from relaykv.engine.handoff_slots import HandoffSlots, Trial
from relaykv.engine.model_runner import ModelRunner
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

    def __init__(self, scheduler: Scheduler, handoffs: HandoffSlots, runner: ModelRunner) -> None:
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._runner = runner
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
            self._launch()
        except Exception:
            _log.exception("observations of hand-offs failed and are dropped")

    def _collect(self) -> None:
        launched, self._launched = self._launched, None
        if launched is None:
            return
        for trial, errors in zip(launched.trials, launched.errors.result(), strict=True):
            self._handoffs.take(trial, errors)

    def _launch(self) -> None:
        held = self._scheduler.take_observations()
        if not held:
            return
        trials = tuple(self._handoffs.observe(observation.key) for observation in held)
        pairs = zip(held, trials, strict=True)
        observations = [Observation(one.copy, trial.lessons) for one, trial in pairs]
        try:
            errors = self._runner.observe(observations)
        except Exception:
            for observation in held:  # nobody knows what their means are now
                self._handoffs.forget(observation.key)
            raise
        self._launched = _Launched(trials, errors)
