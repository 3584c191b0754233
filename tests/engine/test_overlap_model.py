"""Overlap on a real model: a runner that computes as late as possible, and the runner's own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from deferred_runner import DeferredRunner, late_core, prompt_core
from overlap_core import Story, assert_same, play
from tiny_core import ids, request, tiny_core, tiny_parts

from relaykv.engine.assembly import build_core
from relaykv.engine.async_engine import AsyncEngine
from relaykv.engine.request import FinishReason, GenerateRequest, GrammarKind, GrammarSpec

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 5, "maxLength": 20}},
    "required": ["text"],
    "additionalProperties": False,
}


def play_all(
    requests: Sequence[GenerateRequest],
    after: Mapping[str, str] | None = None,
    aborts: Mapping[str, int] | None = None,
    **sizes: int,
) -> Story:
    """Plays without overlap and in both ways with it, and asserts that nobody can tell."""
    expected = play(tiny_core(**sizes), requests, after, aborts)
    parts = tiny_parts(**sizes)
    assert_same(play(prompt_core(parts), requests, after, aborts), expected)
    late = late_core(parts)
    assert_same(play(late, requests, after, aborts), expected)
    assert isinstance(late.runner, DeferredRunner)
    assert late.runner.num_unknown > 0
    return expected


def test_greedy_and_seeded_answers_are_the_same() -> None:
    requests = [
        request(f"r{n}", ids(n, 20 + 17 * n), 25, f"s{n}", temperature=t, seed=n, top_p=p, top_k=k)
        for n, (t, p, k) in enumerate([(0.0, 1.0, 0), (1.5, 1.0, 0), (0.8, 0.9, 0), (1.0, 1.0, 20)])
    ]

    play_all(requests, max_num_batched_tokens=32)


def test_answers_that_end_early_and_those_that_are_left_are_the_same() -> None:
    told = play(tiny_core(), [request("r", ids(1, 30), 30)]).results["r"].token_ids
    stops: list[dict[str, Any]] = [
        {"stop_token_ids": (told[9],)},
        {"stop": (f"{told[12]} {told[13]}",)},
        {"stop": (f"{told[20]} ",), "temperature": 1.0, "seed": 3},
        {},
    ]
    requests = [request(f"r{n}", ids(1, 30), 30, f"s{n}", **s) for n, s in enumerate(stops)]

    story = play_all(requests, aborts={"r3": 11}, max_num_batched_tokens=256)

    reasons = [r.last.finish_reason for r in story.results.values()]
    assert reasons[:2] == [FinishReason.STOP] * 2
    assert reasons[3] is None  # nothing is told to a caller that has left
    assert len(story.results["r3"].token_ids) == 11


def test_penalties_see_every_token() -> None:
    requests = [
        request("rep", ids(2, 40), 20, repetition_penalty=1.4),
        request("freq", ids(3, 50), 30, frequency_penalty=0.9, temperature=1.0, seed=1),
        request("pres", ids(4, 20), 25, presence_penalty=0.7),
        request("plain", ids(5, 20), 45),
    ]

    play_all(requests)


def test_log_probabilities_are_the_same() -> None:
    for prompt in (9, 75):
        wanted = request("r", ids(6, prompt), 12, num_logprobs=3, num_prompt_logprobs=2)

        play_all([wanted], max_num_batched_tokens=32)


def test_preempted_requests_get_the_same_tokens() -> None:
    requests = [request(str(n), ids(n, 50), 60) for n in range(4)]
    expected = play(tiny_core(), requests)
    for build in (prompt_core, late_core):
        core = build(tiny_parts(num_blocks=20, max_model_len=320))
        story = play(core, requests)
        assert core.stats().num_preemptions > 0
        for name, result in expected.results.items():
            assert story.results[name].token_ids == result.token_ids


@pytest.mark.parametrize("policy", ["full", "shift", "epic", "cacheblend", "relay"])
@pytest.mark.parametrize("budget", [32, 256])
def test_agents_in_a_chain_relay_the_same(policy: str, budget: int) -> None:
    first = request("a", ids(7, 33), 61, "s", policy)
    said = play(tiny_core(), [first]).results["a"].token_ids[:60]
    second = request("b", ids(8, 47) + said + ids(9, 12), 40, "s", policy)
    third = request("c", ids(10, 5) + said[:40] + ids(8, 47), 20, "s", policy)
    chain = {"b": "a", "c": "b"}

    story = play_all([first, second, third], chain, max_num_batched_tokens=budget)

    if policy != "full":
        assert story.results["b"].relay.num_relayed_tokens > 0
        assert story.results["c"].relay.num_relayed_tokens > 0


def test_constrained_answers_are_the_same_beside_free_ones() -> None:
    parts = dataclasses.replace(tiny_parts(), tokenizer=byte_tokenizer(ascii_only=True))
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    requests = [
        request("json", ids(1, 40), 60, grammar=grammar, temperature=1.0, seed=1),
        request("json too", ids(2, 90), 60, grammar=grammar, temperature=1.0, seed=2),
        request("free", ids(3, 40), 70),
    ]
    expected = play(build_core(parts), requests)

    for build in (prompt_core, late_core):
        assert_same(play(build(parts), requests), expected)

    assert 5 <= len(json.loads(expected.results["json"].text)["text"]) <= 20
    assert len(expected.results["free"].token_ids) == 70


def test_an_engine_thread_serves_and_rests_with_overlap() -> None:
    prompts = [ids(seed, 20 + seed) for seed in range(5)]
    requests = [request(str(n), prompt, 15) for n, prompt in enumerate(prompts)]
    expected = play(tiny_core(), requests)

    async def collect(engine: AsyncEngine, wanted: GenerateRequest) -> list[int]:
        return [t async for output in engine.generate(wanted) for t in output.token_ids]

    async def main() -> None:
        engine = AsyncEngine(late_core(tiny_parts()), tiny_parts())
        engine.start()
        try:
            for _ in range(2):  # the second time after the thread has waited
                answers = asyncio.gather(*(collect(engine, r) for r in requests))
                told = await asyncio.wait_for(answers, 60)
                assert told == [r.token_ids for r in expected.results.values()]
                # The last step of an answer that a row too many follows is collected unasked.
                await asyncio.sleep(0.05)
            assert (await asyncio.wait_for(engine.stats(), 10)).num_used_blocks == 0
        finally:
            engine.stop()

    asyncio.run(main())


def test_anchors_are_stored_and_used_the_same() -> None:
    requests: list[GenerateRequest] = []
    after: dict[str, str] = {}
    for number, text in enumerate((1, 2, 3, 1, 2)):
        user = [*ids(1, 40), *ids(1000 + text, 9)]
        session = f"s{number}"
        writer = request(f"w{number}", user, 40, session)
        written = play(tiny_core(), [writer]).results[f"w{number}"].token_ids
        prompt = [*ids(2, 35 + 7 * number), *ids(3, 16), *written, *ids(4, 5)]
        reader = request(f"r{number}", prompt, 12, session, "kvcomm")
        requests += [writer, reader]
        after[f"r{number}"] = f"w{number}"
        if number:
            after[f"w{number}"] = f"r{number - 1}"
    # Blocks are so few that rows of ended requests and anchors come to want the same ones.
    requests += [request(f"x{n}", ids(50 + n, 30), 30, stop_token_ids=(9,)) for n in range(4)]

    story = play_all(requests, after, max_num_batched_tokens=256, num_blocks=60)

    served = [story.results[f"r{n}"].relay.segments[0].policy for n in range(5)]
    assert served[:2] == ["full", "full"]
    assert served[3:] == ["kvcomm", "kvcomm"]
