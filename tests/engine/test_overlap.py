"""Scheduling a step while another is in flight changes nothing but the time it takes."""

from __future__ import annotations

from typing import Any

import pytest
from engine_factory import EngineSizes
from overlap_core import EOS_TOKEN_IDS, SMALL, fake_core, num_in_flight, play, play_both
from tiny_core import request

from relaykv.engine.request import FinishReason, GenerateRequest


def events_of(overlap: bool, *requests: GenerateRequest) -> list[tuple[str, int]]:
    engine, core = fake_core(overlap, SMALL)
    play(core, requests)
    return engine.runner.events


def test_a_step_is_launched_before_the_one_in_front_of_it_is_collected() -> None:
    events = events_of(True, request("r", range(6), 4))

    assert events == [
        ("launch", 0),
        ("launch", 1),
        ("result", 0),
        ("launch", 2),
        ("result", 1),
        ("launch", 3),  # samples the fourth token: nothing is launched behind it
        ("result", 2),
        ("result", 3),
    ]


def test_without_overlap_a_step_is_collected_before_the_next_one_is_launched() -> None:
    events = events_of(False, request("r", range(6), 3))

    assert events == [(kind, n) for n in range(3) for kind in ("launch", "result")]


def test_a_first_step_tells_nothing_and_a_last_one_is_still_work() -> None:
    _, core = fake_core(True, SMALL)
    core.add(request("r", range(6), 1))

    assert core.step() == []
    assert core.has_work
    (output,) = core.step()
    assert output.finish_reason is FinishReason.LENGTH
    assert core.step() == []
    assert not core._in_flight


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 40, 70, 254, 255])
def test_answers_end_at_their_limits_without_a_row_too_many(num_prompt_tokens: int) -> None:
    prompt = range(num_prompt_tokens)

    story, core = play_both([request("r", prompt, 11, session="s")])

    assert story.results["r"].last.finish_reason is FinishReason.LENGTH
    num_chunks = -(-num_prompt_tokens // 32)
    num_answered = min(11, 256 - num_prompt_tokens)
    assert num_in_flight(core) == [1] + [2] * (num_chunks + num_answered - 2)


def test_a_stop_token_ends_the_answer_and_the_row_behind_it_is_dropped() -> None:
    (first,) = play(fake_core(False, SMALL)[1], [request("r", range(9), 9)]).results.values()
    end = first.token_ids[4]

    story, core = play_both(
        [request("r", range(9), 9, session="s", stop_token_ids=(end,))],
    )

    assert story.results["r"].token_ids == first.token_ids[:4]
    assert story.results["r"].last.finish_reason is FinishReason.STOP
    assert len(num_in_flight(core)) == 6  # samples the four, the stop token, and one more
    assert story.recordings["r"][1] == (*range(9), *first.token_ids[:4])


def test_end_of_turn_and_stop_strings_end_answers_alike() -> None:
    requests = [
        request(f"r{n}", [500 + n, *range(n % 9)], 60, f"s{n}", ignore_eos=False, stop=stop)
        for n, stop in enumerate([(), ("7 ",), ("12", "345 6"), ("1 2",)] * 6)
    ]

    story, _ = play_both(requests, sizes=EngineSizes(num_blocks=600, max_num_requests=24))

    reasons = {result.last.finish_reason for result in story.results.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(story.recordings) == 24
    assert not any(set(r.token_ids) & EOS_TOKEN_IDS for r in story.results.values())


@pytest.mark.parametrize(
    "sampling",
    [{"repetition_penalty": 1.5}, {"frequency_penalty": 0.5}, {"presence_penalty": -0.5}],
)
def test_a_request_that_must_know_its_tokens_is_never_ahead_of_them(
    sampling: dict[str, Any],
) -> None:
    story, core = play_both(
        [request("slow", range(40), 5, **sampling), request("plain", range(50, 59), 12)]
    )

    # The slow prompt's second chunk is ahead; then every step waits, up to the last slow one.
    assert num_in_flight(core) == [1, 2, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert [len(r.token_ids) for r in story.results.values()] == [5, 12]


@pytest.mark.parametrize("policy", ["shift", "epic", "cacheblend", "relay", "full"])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_chain_of_agents_relays_the_same(policy: str, budget: int) -> None:
    sizes = EngineSizes(num_blocks=200, max_num_batched_tokens=budget)
    first = request("a", range(20), 25, "s", policy)
    said = play(fake_core(False, sizes)[1], [first]).results["a"].token_ids
    second = request("b", [*range(60, 80), *said, *range(90, 95)], 30, "s", policy)
    third = request("c", [*range(70, 77), *said[3:20], 1, *said], 10, "s", policy)
    beside = request("x", range(300, 350), 60)

    story, _ = play_both([first, second, third, beside], after={"b": "a", "c": "b"}, sizes=sizes)

    if policy != "full":
        assert story.results["b"].relay.num_relayed_tokens > 0
        assert story.results["c"].relay.num_relayed_tokens > 0


def test_a_prefix_is_hit_only_when_the_step_that_computes_it_is_over() -> None:
    hits = {}
    for overlap in (False, True):
        _, core = fake_core(overlap, EngineSizes(max_num_batched_tokens=16))
        story = play(core, [request(name, range(42), 4) for name in "abc"])
        assert story.results["a"].token_ids == story.results["b"].token_ids
        hits[overlap] = [r.last.usage.num_cached_tokens for r in story.results.values()]

    assert hits == {False: [0, 32, 40], True: [0, 16, 40]}
