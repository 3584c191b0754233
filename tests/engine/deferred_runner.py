"""A model runner that is as late as a device ever might be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.batch import (
    UNKNOWN_TOKEN,
    AnchorQuery,
    AnchorRecord,
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

    def result(self) -> ModelRunnerOutput:
        return self.runner.output(self.number)


class DeferredRunner:
    """Runs a step only when its result is asked for, as late as a device ever might.

    Puts the token that the step before has sampled in the place of an unknown one, as the device
    does. A row's earlier output tokens stay unknown: only their number may be used.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_launched = 0
        self._num_run = 0
        self._queue: deque[Callable[[], None]] = deque()  # as a device's
        self._outputs: dict[int, ModelRunnerOutput] = {}
        self._last: Mapping[str, SampledToken] = {}
        self.num_unknown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: ScheduledBatch) -> _DeferredStep:
        self._num_launched += 1
        assert self._num_launched - self._num_run <= 2
        self._queue.append(partial(self._run, self._num_launched, batch))
        for part in batch.requests:
            self.num_unknown += UNKNOWN_TOKEN in part.token_ids
        return _DeferredStep(self, self._num_launched)

    def store_anchors(self, records: Sequence[AnchorRecord]) -> None:
        self._queue.append(partial(self._runner.store_anchors, tuple(records)))

    def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
        """Waits for all that was launched, as reading from the device does."""
        while self._queue:
            self._queue.popleft()()
        return self._runner.anchor_distances(queries)

    def output(self, number: int) -> ModelRunnerOutput:
        while number not in self._outputs:
            self._queue.popleft()()
        return self._outputs.pop(number)

    def _run(self, number: int, batch: ScheduledBatch) -> None:
        self._num_run += 1
        assert number == self._num_run, "a step run out of order"
        known = replace(batch, requests=tuple(self._known(part) for part in batch.requests))
        output = self._runner.execute(known)
        self._last = output.sampled
        self._outputs[number] = output

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
    core.runner = late = cast(ModelRunner, DeferredRunner(core.runner))
    core._lessons._runner = late  # type: ignore[union-attr]
    gate = core._scheduler._admission._chooser._anchors
    assert gate is not None
    gate._meter = late
    return core
