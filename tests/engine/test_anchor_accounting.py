"""Whatever happens to requests, anchors keep what they hold, and give it back in the end."""

from __future__ import annotations

import random

import pytest
from engine_factory import (
    EngineSizes,
    FakeEngine,
    assert_answered,
    expected_answer,
    make_request,
)

from relaykv.engine.request import FinishReason
from relaykv.engine.request_state import Request

GLUE = tuple(range(900, 916))


class Pipelines:
    """Writers whose texts readers of three kinds quote behind always the same words."""

    def __init__(self, seed: int, engine: FakeEngine) -> None:
        self._random = random.Random(seed)
        self._engine = engine
        self._count = 0
        self.requests: list[Request] = []

    def add(self) -> None:
        finished = [r for r in self._engine.finished.values() if r.spec.request_id.startswith("w")]
        self._count += 1
        number = self._count
        if not finished or self._random.random() < 0.4:
            prompt = [self._random.randrange(2), *range(9)]  # so that texts recur
            request = make_request(
                f"w{number}", prompt, 24, f"s{number % 2}", "full", agent_class="writer"
            )
        else:
            written = self._random.choice(finished[-4:])
            said = written.output_token_ids[: self._random.choice((9, 14, 23))]
            noise = [self._random.randrange(1000) for _ in range(1 + self._random.randrange(4))]
            prompt = [*noise, *GLUE, *said, 7, *noise]
            request = make_request(
                f"r{number}",
                prompt,
                self._random.choice((1, 4, 12)),
                written.spec.relay.session,
                "kvcomm",
                store=self._random.random() < 0.2,  # it holds the words before the text too
                agent_class=self._random.choice(("critic", "critic", "editor")),
            )
        self.requests.append(self._engine.add(request))

    def disturb(self) -> None:
        if self._engine.waiting and self._random.random() < 0.05:
            name = self._random.choice(sorted(self._engine.waiting))
            request = self._engine.waiting[name]
            self._engine.abort(name, self._random.randint(0, request.num_output_tokens))
        if self._random.random() < 0.01 and self.requests:
            key = self.requests[-1].session_key
            assert key is not None
            self._engine.recordings.delete_session(key)

    @property
    def wants_more(self) -> bool:
        return self._random.random() < 0.5


def play(seed: int, sizes: EngineSizes) -> FakeEngine:
    engine = FakeEngine(sizes)
    pipelines = Pipelines(seed, engine)
    while len(pipelines.requests) < 150 or engine.scheduler.has_work or engine.lessons.has_work:
        while len(pipelines.requests) < 150 and pipelines.wants_more:
            pipelines.add()
        pipelines.disturb()
        engine.step()  # which checks every block and every slot that is read
    for request in pipelines.requests:
        answer = expected_answer(request, sizes.max_model_len)
        assert list(request.output_token_ids) == answer[: request.num_output_tokens]
        assert len(answer) == request.num_output_tokens or (
            request.finish_reason is FinishReason.ABORT
        )
    return engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(EngineSizes(num_blocks=30), id="a pool of 30 blocks"),
        pytest.param(EngineSizes(num_blocks=120), id="a pool of 120 blocks"),
        pytest.param(EngineSizes(num_blocks=60, max_num_batched_tokens=7), id="chunks of 7 tokens"),
        pytest.param(EngineSizes(num_blocks=400, block_size=1), id="blocks of one token"),
    ],
)
def test_random_pipelines_leave_every_block_accounted_for(seed: int, sizes: EngineSizes) -> None:
    engine = play(seed, sizes)

    counts = engine.pool.counts()
    assert counts.used == 0
    assert counts.free + counts.cached + counts.recorded == sizes.num_blocks
    for key in {recording.key for recording in engine.all_recordings()}:
        engine.recordings.delete_session(key)
    assert engine.pool.counts().recorded == engine.anchors.num_blocks
    assert engine.anchors.evict_until(sizes.num_blocks)
    assert engine.anchors.num_blocks == engine.anchors.num_anchors == 0


def test_the_random_pipelines_really_store_use_refuse_and_preempt() -> None:
    roomy, narrow = play(5, EngineSizes(num_blocks=120)), play(5, EngineSizes(num_blocks=40))

    assert roomy.runner.num_anchored_tokens > 100
    assert roomy.runner.num_corrected_tokens > 50
    assert roomy.anchors.num_refused > 0
    assert narrow.runner.num_anchored_tokens > 50
    assert narrow.scheduler.num_preemptions > 10


def test_anchors_give_way_to_requests_that_need_their_blocks() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=40))
    writer = engine.add(make_request("w", range(10), 20, "s", "full", agent_class="writer"))
    engine.run()
    prompt = [*GLUE, *writer.output_token_ids, 7]
    engine.add(make_request("r", prompt, 2, "s", "kvcomm", agent_class="critic"))
    engine.run()
    assert engine.anchors.num_anchors == 1

    large = engine.add(make_request("large", range(100, 250), 2))
    engine.run()

    assert_answered(engine, large)
    assert engine.anchors.num_anchors == 0


def test_anchors_outlive_the_session_of_their_texts() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=60))
    for session in ("first", "second"):
        writer = engine.add(
            make_request(f"w{session}", range(10), 20, session, "full", agent_class="writer")
        )
        engine.run()
        prompt = [len(session), *GLUE, *writer.output_token_ids, 7]
        reader = engine.add(
            make_request(f"r{session}", prompt, 2, session, "kvcomm", agent_class="critic")
        )
        engine.run()
        assert writer.session_key is not None
        engine.recordings.delete_session(writer.session_key)
    assert engine.runner.num_corrected_tokens == 19
    assert reader.report(engine.runner.num_layers).num_relayed_tokens == 19
    assert engine.anchors.num_anchors == 1
