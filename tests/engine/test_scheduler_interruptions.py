"""Preemption, abort and failure of requests at every moment."""

from __future__ import annotations

import pytest
from engine_factory import EngineSizes, FakeEngine, assert_answered, make_request

from relaykv.engine.batch import ModelRunnerOutput, RecomputeCount, SampledToken
from relaykv.engine.request import FinishReason
from relaykv.engine.request_state import RequestStatus

SAID = list(range(500, 524))


def test_the_newest_request_is_preempted_and_answers_the_same_after_all() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=8))
    old = engine.add(make_request("old", range(12), max_tokens=12))
    new = engine.add(make_request("new", range(100, 112), max_tokens=12))
    later = engine.add(make_request("later", range(200, 212), max_tokens=2))

    while not engine.scheduler.num_preemptions:
        engine.step()
    assert new.status is RequestStatus.WAITING
    assert new.blocks == []
    assert old.status is RequestStatus.RUNNING
    engine.run()

    assert list(engine.finished) == ["old", "new", "later"]
    assert_answered(engine, old, new, later)


def test_recordings_give_way_before_anybody_is_preempted() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=8))
    engine.serve(make_request("writer", SAID[:12], max_tokens=1, session="s"))
    engine.add(make_request("a", range(8), max_tokens=8))
    engine.add(make_request("b", range(100, 108), max_tokens=8))
    engine.run()

    assert engine.scheduler.num_preemptions == 0
    assert len(engine.recordings) == 0


@pytest.mark.parametrize("num_answered", [1, 7])
def test_a_relayed_request_that_was_preempted_reports_its_first_admission(
    num_answered: int,
) -> None:
    engine = FakeEngine(EngineSizes(num_blocks=16, max_num_batched_tokens=64))
    engine.serve(make_request("writer", SAID, max_tokens=1, session="s"))
    old = engine.add(make_request("old", range(3), max_tokens=33))
    prompt = [1, *SAID, 2]
    request = engine.add(make_request("r", prompt, max_tokens=9, session="s", policy="epic"))
    while request.num_output_tokens < num_answered:
        engine.step()
    report = request.report(8)
    assert report.num_recomputed_tokens == 3

    engine.scheduler._preempt(request)
    engine.check()
    engine.run()

    assert request.report(8) == report
    assert_answered(engine, old, request)


def test_a_preempted_request_that_finds_its_recording_gone_is_exact_again() -> None:
    engine = FakeEngine()
    engine.serve(make_request("writer", SAID, max_tokens=1, session="s"))
    request = engine.add(make_request("r", [1, *SAID, 2], max_tokens=9, session="s"))
    engine.step()
    assert request.taint == 1

    engine.scheduler._preempt(request)
    engine.pool.release(engine.pool.allocate(engine.pool.num_idle))  # forget its own blocks
    assert request.session_key is not None
    engine.recordings.delete_session(request.session_key)
    engine.run()

    assert engine.all_recordings()[0].taint == 0
    plain = engine.serve(make_request("plain", [1, *SAID, 2]))
    assert plain.usage().num_cached_tokens == 24


def test_repair_counts_of_a_later_admission_are_not_added_to_the_first() -> None:
    engine = FakeEngine()
    request = engine.add(make_request("r", range(6), session="s", policy="relay"))
    batch = engine.scheduler.schedule()
    request.first_plan = None  # as if this were not the first admission
    output = ModelRunnerOutput({}, {"r": RecomputeCount({0: (1, 4)}, 40)})

    engine.scheduler.advance(batch)
    engine.scheduler.update(batch, output, ())

    assert request.recomputed == {}
    assert request.num_relay_layer_tokens == 0


def test_a_waiting_request_is_aborted_without_a_trace() -> None:
    engine = FakeEngine(EngineSizes(max_num_requests=1))
    engine.add(make_request("a", range(6)))
    waiting = engine.add(make_request("b", range(100, 120), session="s"))
    engine.step()

    engine.abort("b")

    assert waiting.finish_reason is FinishReason.ABORT
    assert engine.scheduler.num_waiting == 0
    assert len(engine.recordings) == 0
    engine.run()


@pytest.mark.parametrize("num_steps", range(1, 12))
@pytest.mark.parametrize("victim", ["relayed", "plain"])
def test_an_abort_at_any_step_frees_the_blocks_at_once(num_steps: int, victim: str) -> None:
    engine = FakeEngine(EngineSizes(num_blocks=20, max_num_batched_tokens=8))
    engine.serve(make_request("writer", SAID, max_tokens=1, session="s"))
    prompt = [*range(10), *SAID, 1]
    requests = {
        "relayed": make_request("relayed", prompt, max_tokens=5, session="s", policy="relay"),
        "plain": make_request("plain", range(100, 120), max_tokens=5),
    }
    for request in requests.values():
        engine.add(request)
    for _ in range(num_steps):
        if engine.scheduler.has_work:
            engine.step()

    if victim in engine.scheduler:
        engine.abort(victim)  # checks that nobody holds blocks for it any more
    engine.run()

    assert engine.pool.counts().used == 0
    other = requests["plain" if victim == "relayed" else "relayed"]
    assert_answered(engine, other)


@pytest.mark.parametrize(("num_visible", "num_recorded"), [(0, 9), (2, 11), (4, 13), (5, 13)])
def test_an_aborted_request_records_only_what_the_client_saw(
    num_visible: int, num_recorded: int
) -> None:
    engine = FakeEngine()
    request = engine.add(make_request("r", range(9), max_tokens=50, session="s"))
    while request.num_output_tokens < 5:
        engine.step()

    engine.abort("r", num_visible)

    recording = engine.all_recordings()[0]
    assert recording.token_ids == tuple(request.token_ids[:num_recorded])
    assert len(recording.blocks) == -(-num_recorded // 4)


def test_a_request_aborted_in_its_prompt_records_nothing() -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=8))
    engine.add(make_request("r", range(30), session="s"))
    engine.step()

    engine.abort("r")

    assert len(engine.recordings) == 0


def test_a_failed_request_records_nothing_and_names_no_block() -> None:
    engine = FakeEngine()
    request = engine.add(make_request("r", range(9), session="s"))
    engine.scheduler.schedule()

    engine.scheduler.finish("r", FinishReason.ERROR, 0)

    assert request.finish_reason is FinishReason.ERROR
    assert len(engine.recordings) == 0
    assert engine.pool.counts().free == engine.pool.num_blocks


def test_a_step_that_failed_while_it_relayed_lets_go_of_the_sources() -> None:
    engine = FakeEngine()
    engine.serve(make_request("writer", SAID, session="s"))
    request = engine.add(make_request("r", [1, *SAID, 2], session="s"))
    engine.scheduler.schedule()
    assert request.source_blocks

    engine.scheduler.finish("r", FinishReason.ERROR, 0)

    assert request.source_blocks == []
    assert engine.pool.counts().used == 0


def test_blocks_get_their_names_when_the_step_is_over_and_never_for_a_token_to_come() -> None:
    engine = FakeEngine()
    request = engine.add(make_request("r", range(7), max_tokens=9))
    first = engine.scheduler.schedule()
    engine.scheduler.advance(first)
    second = engine.scheduler.schedule()
    engine.scheduler.advance(second)  # with the first token still unknown, the second block is full

    assert request.num_computed_tokens == 8
    assert request.block_hashes == []
    engine.scheduler.update(first, ModelRunnerOutput({"r": SampledToken(70, None)}, {}), ())
    assert len(request.block_hashes) == 1
    engine.scheduler.update(second, ModelRunnerOutput({"r": SampledToken(71, None)}, {}), ())
    assert len(request.block_hashes) == 2
    assert request.token_ids == [*range(7), 70, 71]
    same = engine.prefix_cache.match([*range(7), 70, 71], "")
    assert len(same.blocks) == 2


def test_sources_are_let_go_at_the_launch_and_kept_in_order_by_the_device() -> None:
    engine = FakeEngine()
    engine.serve(make_request("writer", SAID, session="s"))
    request = engine.add(make_request("r", [1, *SAID, 2], session="s"))
    batch = engine.scheduler.schedule()
    assert request.source_blocks

    engine.scheduler.advance(batch)

    assert request.source_blocks == []
    engine.check()


def test_what_a_step_in_flight_computes_is_not_recorded() -> None:
    engine = FakeEngine()
    engine.add(make_request("r", range(7), max_tokens=9, session="s"))
    first = engine.scheduler.schedule()
    engine.scheduler.advance(first)
    engine.scheduler.advance(engine.scheduler.schedule())
    engine.scheduler.update(first, ModelRunnerOutput({"r": SampledToken(70, None)}, {}), ())

    engine.abort("r", 1)

    assert engine.all_recordings()[0].token_ids == tuple(range(7))
    assert engine.pool.counts().used == 0
