"""A model runner that is as late as a device ever might be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.batch import (
    UNKNOWN_TOKEN,
    ModelRunnerOutput,
    SampledToken,
    ScheduledBatch,
    ScheduledRequest,
)
from relaykv.engine.core import EngineCore
from relaykv.engine.model_runner import ModelRunner


@dataclass(slots=True)
class _DeferredStep:
    runner: DeferredRunner
    number: int
    batch: ScheduledBatch

    def result(self) -> ModelRunnerOutput:
        return self.runner.run(self.number, self.batch)


class DeferredRunner:
    """Runs a step only when its result is asked for, as late as a device ever might.

    Puts the token that the step before has sampled in the place of an unknown one, as the device
    does. A row's earlier output tokens stay unknown: only their number may be used.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_launched = 0
        self._num_run = 0
        self._last: Mapping[str, SampledToken] = {}
        self.num_unknown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: ScheduledBatch) -> _DeferredStep:
        self._num_launched += 1
        assert self._num_launched - self._num_run <= 2
        for part in batch.requests:
            self.num_unknown += UNKNOWN_TOKEN in part.token_ids
        return _DeferredStep(self, self._num_launched, batch)

    def run(self, number: int, batch: ScheduledBatch) -> ModelRunnerOutput:
        self._num_run += 1
        assert number == self._num_run, "a step collected out of order"
        known = replace(batch, requests=tuple(self._known(part) for part in batch.requests))
        output = self._runner.execute(known)
        self._last = output.sampled
        return output

    def _known(self, part: ScheduledRequest) -> ScheduledRequest:
        assert UNKNOWN_TOKEN not in part.token_ids[:-1]
        if UNKNOWN_TOKEN not in part.token_ids:
            return part
        token = self._last[part.request_id]
        return replace(part, token_ids=(*part.token_ids[:-1], token.token_id))


def prompt_core(parts: EngineParts) -> EngineCore:
    """A core with overlap whose runner computes a step when it is launched."""
    return build_core(replace(parts, device=replace(parts.device, overlap=True)))


def late_core(parts: EngineParts) -> EngineCore:
    """A core with overlap whose runner computes a step when its result is asked for."""
    core = prompt_core(parts)
    core.runner = cast(ModelRunner, DeferredRunner(core.runner))
    return core
