"""What a launched step copies to the device, and that nothing in it waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from sync_recorder import SyncRecorder
from tiny_core import ids, request, run, tiny_core

from relaykv.engine.batch import PendingStep, ScheduledBatch
from relaykv.engine.core import EngineCore
from relaykv.engine.request import GenerateRequest
from relaykv.kernels.staging import Staging


@dataclass(frozen=True)
class Launch:
    """What launching one step did."""

    num_uploads: int
    calls: tuple[str, ...]  # that wait for the device, or copy to it besides


class WatchedCore:
    """A core whose launches are recorded."""

    def __init__(self, core: EngineCore, recorder: SyncRecorder) -> None:
        self.core = core
        self.launches: list[Launch] = []
        self._recorder = recorder
        self._launch = core.runner.launch
        core.runner.launch = self._watch  # type: ignore[method-assign]

    def launches_of(self, *requests: GenerateRequest) -> list[Launch]:
        self.launches.clear()
        run(self.core, *requests)
        return self.launches

    def _watch(self, batch: ScheduledBatch) -> PendingStep:
        uploads, calls = self._recorder.num_expected, len(self._recorder.calls)
        with self._recorder:
            step = self._launch(batch)
        made = self._recorder.num_expected - uploads
        self.launches.append(Launch(made, tuple(self._recorder.calls[calls:])))
        return step


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    recorder = SyncRecorder()
    monkeypatch.setattr(Staging, "upload", recorder.expecting(Staging.upload))
    return WatchedCore(tiny_core(max_num_batched_tokens=256), recorder)


def _reader(written: Sequence[int], policy: str) -> GenerateRequest:
    return request("r", [*ids(2, 60), *written, *ids(3, 11)], 4, session="s", policy=policy)


def _written(core: EngineCore) -> list[int]:
    (writer,) = run(core, request("w", ids(1, 50), 60, session="s"))
    return writer.token_ids


def test_greedy_steps_make_one_copy_each_and_never_wait(watched: WatchedCore) -> None:
    launches = watched.launches_of(request("a", ids(1, 40), 6), request("b", ids(2, 9), 4))

    assert launches == [Launch(1, ())] * 6


def test_drawing_takes_one_more_copy(watched: WatchedCore) -> None:
    launches = watched.launches_of(request("a", ids(1, 40), 5, temperature=0.9, min_p=0.1, seed=1))

    assert launches == [Launch(2, ())] * 5


def test_logprobs_take_one_more_copy_where_only_some_rows_ask(watched: WatchedCore) -> None:
    launches = watched.launches_of(
        request("a", ids(1, 40), 5, num_logprobs=2), request("b", ids(2, 9), 5)
    )

    assert launches == [Launch(2, ())] * 5


@pytest.mark.parametrize("policy", ["shift", "epic"])
def test_a_relay_that_knows_its_rows_takes_one_more_copy(watched: WatchedCore, policy: str) -> None:
    written = _written(watched.core)

    first, *decodes = watched.launches_of(_reader(written, policy))

    assert first == Launch(2, ())
    assert decodes == [Launch(1, ())] * 3


@pytest.mark.parametrize("policy", ["cacheblend", "relay"])
def test_a_relay_that_selects_waits_once_and_then_copies_again(
    watched: WatchedCore, policy: str
) -> None:
    written = _written(watched.core)

    first, *decodes = watched.launches_of(_reader(written, policy))

    assert first == Launch(3, ("tolist",))
    assert decodes == [Launch(1, ())] * 3
