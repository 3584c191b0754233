"""Whatever happens to requests, no block is lost, and none is read after its reuse."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from engine_factory import EngineSizes, FakeEngine, expected_answer, make_request
from fake_runner import VOCAB_SIZE

from relaykv.engine.request import FinishReason
from relaykv.engine.request_state import Request


class Traffic:
    """Random requests that share prefixes and quote what earlier ones said."""

    def __init__(self, seed: int, sizes: EngineSizes) -> None:
        self._random = random.Random(seed)
        self._sizes = sizes
        self._prefixes = [self._noise(n) for n in (3, 4, 5, 16, 31)]
        self._told: list[list[int]] = [self._noise(20)]
        self._count = 0

    def request(self) -> Request:
        pick = self._random
        longest = self._sizes.max_model_len - 2
        prompt = list(pick.choice(self._prefixes)) if pick.random() < 0.5 else []
        for _ in range(pick.randrange(5)):
            if pick.random() < 0.7:
                text = pick.choice(self._told[-8:])
                start = pick.choice((0, 1, len(text) // 3, len(text) - 1))
                prompt += text[start : start + pick.randrange(4, 40)]
            else:
                prompt += self._noise(pick.randrange(6))
        prompt = (prompt or self._noise(1))[: pick.choice((longest, longest // 2))]
        self._count += 1
        return make_request(
            f"r{self._count}",
            prompt,
            max_tokens=pick.choice((1, 2, 3, 5, 9, 17)),
            session=pick.choice((None, "s", "s", "s", "s", "t")),
            policy=pick.choice(("full", "shift", "epic", "relay", "learned", "auto", "observe")),
            tenant=pick.choice(("", "", "", "b")),
            store=pick.random() < 0.9,
            stop_token_ids=tuple(range(100)) if pick.random() < 0.3 else (),
        )

    def learn(self, request: Request) -> None:
        self._told.append(list(request.token_ids))

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def choice(self, ids: list[str]) -> str:
        return self._random.choice(ids)

    def visible(self, request: Request) -> int:
        return self._random.randint(0, request.num_output_tokens)

    def _noise(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE) for _ in range(count)]


def play(seed: int, sizes: EngineSizes, num_requests: int = 200) -> FakeEngine:
    engine = FakeEngine(sizes)
    traffic = Traffic(seed, sizes)
    added: list[Request] = []
    while len(added) < num_requests or engine.scheduler.has_work:
        while len(added) < num_requests and traffic.chance(0.5):
            added.append(engine.add(traffic.request()))
        if engine.waiting and traffic.chance(0.04):
            request = engine.waiting[traffic.choice(sorted(engine.waiting))]
            engine.abort(request.id, traffic.visible(request))
        if traffic.chance(0.01):
            key = next((r.session_key for r in added if r.session_key is not None), None)
            if key is not None:
                engine.recordings.delete_session(key)
                engine.check()
        engine.step()
        for request_id in list(engine.finished)[-3:]:
            traffic.learn(engine.finished[request_id])
    for request in added:
        answer = expected_answer(request, sizes.max_model_len)
        if request.finish_reason is FinishReason.ABORT:
            assert list(request.output_token_ids) == answer[: request.num_output_tokens]
        else:
            assert list(request.output_token_ids) == answer
    return engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(EngineSizes(num_blocks=24), id="a pool of 24 blocks"),
        pytest.param(EngineSizes(num_blocks=60), id="a pool of 60 blocks"),
        pytest.param(
            EngineSizes(num_blocks=40, max_num_batched_tokens=7, max_num_requests=3),
            id="chunks of at most 7 tokens",
        ),
        pytest.param(EngineSizes(num_blocks=200, block_size=1), id="blocks of one token"),
    ],
)
def test_two_hundred_random_requests_leave_every_block_accounted_for(
    seed: int, sizes: EngineSizes
) -> None:
    engine = play(seed, sizes)

    counts = engine.pool.counts()
    assert counts.used == 0
    assert counts.free + counts.cached + counts.recorded == sizes.num_blocks
    assert len(engine.finished) == 200
    reasons = Counter(request.finish_reason for request in engine.finished.values())
    assert reasons[FinishReason.LENGTH] > 50
    assert reasons[FinishReason.ABORT] > 0


def test_the_random_mix_really_preempts_relays_hits_and_evicts() -> None:
    engine = play(11, EngineSizes(num_blocks=40))

    assert engine.scheduler.num_preemptions > 3
    assert engine.runner.num_copied_tokens > 100
    assert engine.runner.num_observed_tokens > 40
    requests = engine.finished.values()
    assert sum(request.usage().num_cached_tokens > 0 for request in requests) > 15
    assert len(engine.recordings) < 20


def test_deleting_every_session_at_the_end_leaves_nothing_recorded() -> None:
    engine = play(5, EngineSizes(num_blocks=80))

    for key in {recording.key for recording in engine.all_recordings()}:
        assert engine.recordings.delete_session(key)

    assert len(engine.recordings) == 0
    assert engine.pool.counts().recorded == 0
    assert engine.pool.num_idle == engine.pool.num_blocks
    engine.check()
