"""Aborts, preemption and failure while a step is in flight."""

from __future__ import annotations

import pytest
from engine_factory import EngineSizes, FakeEngine
from overlap_core import SMALL, assert_same, fake_core, num_in_flight, play, play_both
from tiny_core import request

from relaykv.engine.request import FinishReason, GenerateRequest


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_an_aborted_answer_is_recorded_as_far_as_its_caller_saw_it(num_tokens: int) -> None:
    requests = [request("a", range(9), 12, "s"), request("b", range(50, 90), 12, "s")]

    story, _ = play_both(requests, aborts={"a": num_tokens})

    assert len(story.results["a"].token_ids) == num_tokens
    assert story.recordings["a"][1] == (*range(9), *story.results["a"].token_ids[:-1])


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("victim", ["relayed", "plain"])
def test_an_abort_in_mid_flight_frees_the_blocks_at_once(num_steps: int, victim: str) -> None:
    engine, core = fake_core(True, EngineSizes(num_blocks=24, max_num_batched_tokens=8))
    said = list(range(500, 524))
    play(core, [request("writer", said, 1, "s")])
    core.add(request("relayed", [*range(10), *said, 1], 5, "s", "relay"))
    core.add(request("plain", range(100, 120), 5))
    outputs = [output for _ in range(num_steps) for output in core.step()]

    core.abort(victim)

    engine.check()
    held = {request.id for request in engine.scheduler.running()}
    assert victim not in held
    while core.has_work:
        outputs += core.step()
        engine.check()
    assert core.stats().num_used_blocks == 0
    other = "plain" if victim == "relayed" else "relayed"
    assert sum(len(o.token_ids) for o in outputs if o.request_id == other) == 5


def test_an_id_is_free_again_although_a_step_of_its_former_owner_is_in_flight() -> None:
    _, core = fake_core(True, SMALL)
    core.add(request("r", range(9), 12))
    for _ in range(4):
        core.step()
    core.abort("r")

    story = play(core, [request("r", range(30, 50), 6)])

    assert_same(story, play(fake_core(False, SMALL)[1], [request("r", range(30, 50), 6)]))


def test_a_request_is_preempted_only_when_nothing_is_in_flight() -> None:
    requests = [request(f"r{n}", range(100 * n, 100 * n + 12), 14) for n in range(4)]
    sizes = EngineSizes(num_blocks=12)

    story, core = play_both(requests, sizes=sizes)

    assert core.stats().num_preemptions > 0
    assert [len(result.token_ids) for result in story.results.values()] == [14] * 4


def fail_at(engine: FakeEngine, kind: str, number: int) -> set[str]:
    """Lets one step fail; returns what will hold the requests that run at that time."""
    running = set[str]()

    def fail(event: str, step: int) -> None:
        if (event, step) == (kind, number):
            engine.runner.fail = lambda _event, _step: None
            running.update(request.id for request in engine.scheduler.running())
            raise RuntimeError("out of cheese")

    engine.runner.fail = fail
    return running


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["launch", "result"])
def test_a_failing_step_ends_what_runs_and_nothing_else(kind: str, number: int) -> None:
    engine, core = fake_core(True, EngineSizes(max_num_batched_tokens=16, max_num_requests=3))
    said = list(range(500, 524))
    play(core, [request("writer", said, 1, "s")])
    prompts = {"short": range(9), "relayed": [*range(10), *said, 1], "long": range(100, 120)}
    running = fail_at(engine, kind, number + engine.runner.events[-1][1])

    def requests(suffix: str) -> list[GenerateRequest]:
        lengths = {"short": 4, "relayed": 15, "long": 15, "last": 5}
        return [
            request(name + suffix, prompts.get(name, range(200, 230)), length, "s", "relay")
            for name, length in lengths.items()
        ]

    story = play(core, requests(""), check=engine.check)
    again = play(core, requests(" again"), check=engine.check)  # reads no KV of failed steps

    assert 0 < len(running) < 4
    for name, result in story.results.items():
        whole = again.results[f"{name} again"]
        assert whole.last.finish_reason is FinishReason.LENGTH
        if result.last.finish_reason is FinishReason.ERROR:
            assert name in running
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]
            assert name not in story.recordings
        else:
            assert result.token_ids == whole.token_ids
            assert name not in running or kind == "launch"  # the result before still counted
    assert any(r.last.finish_reason is FinishReason.ERROR for r in story.results.values())
    assert max(num_in_flight(core)) == 2


def test_a_launch_that_fails_does_not_cost_the_result_of_the_step_before() -> None:
    engine, core = fake_core(True, SMALL)
    fail_at(engine, "launch", 3)

    story = play(core, [request("ends", range(9), 3), request("fails", range(50, 59), 9)])

    assert story.results["ends"].last.finish_reason is FinishReason.LENGTH
    outputs = story.results["fails"].outputs
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1, 0]
    assert outputs[-1].finish_reason is FinishReason.ERROR


def test_waiting_requests_are_served_after_a_failing_step() -> None:
    engine, core = fake_core(True, EngineSizes(max_num_requests=1))
    fail_at(engine, "result", 1)

    story = play(core, [request("fails", range(9), 9), request("waits", range(50, 59), 9)])

    assert story.results["fails"].last.finish_reason is FinishReason.ERROR
    assert len(story.results["waits"].token_ids) == 9
