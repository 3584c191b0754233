"""Random chains of agents, served without and with overlap."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_factory import EngineSizes
from fake_runner import next_token
from overlap_core import fake_core, num_in_flight, play, play_both
from tiny_core import request

from relaykv.engine.request import GenerateRequest

Programme = tuple[list[GenerateRequest], dict[str, str], dict[str, int]]


def random_programme(seed: int) -> Programme:
    """Chains of agents that quote each other, and what makes answers end early."""
    pick = random.Random(seed)
    requests: list[GenerateRequest] = []
    after: dict[str, str] = {}
    aborts: dict[str, int] = {}
    for chain in range(12):
        prompt = [pick.randrange(40, 1000) for _ in range(pick.randrange(1, 60))]
        for turn in range(pick.randrange(1, 4)):
            name = f"{chain}.{turn}"
            sampling: dict[str, Any] = {"ignore_eos": pick.random() < 0.8}
            sampling["stop"] = pick.choice(((), (), ("77 ",), ("5 ",)))
            sampling["stop_token_ids"] = pick.choice(((), tuple(range(100, 130))))
            sampling["presence_penalty"] = pick.choice((0.0,) * 15 + (0.5,))
            policy = pick.choice(("full", "shift", "epic", "cacheblend", "relay"))
            session = pick.choice((None, f"s{chain}", f"s{chain}"))
            max_tokens = pick.choice((1, 2, 5, 20, 50, 90))
            requests.append(request(name, prompt, max_tokens, session, policy, **sampling))
            if turn:
                after[name] = f"{chain}.{turn - 1}"
            if pick.random() < 0.2:
                aborts[name] = pick.randrange(1, 20)
            for _ in range(20):  # what it answers, if nothing ends it
                prompt.append(next_token(prompt))
            prompt = [pick.randrange(40, 1000) for _ in range(9)] + prompt
    return requests, after, aborts


@pytest.mark.parametrize("budget", [9, 64])
@pytest.mark.parametrize("seed", range(6))
def test_random_chains_of_agents_cannot_tell_the_difference(seed: int, budget: int) -> None:
    requests, after, aborts = random_programme(seed)
    sizes = EngineSizes(num_blocks=2000, max_num_batched_tokens=budget, max_num_requests=6)

    story, core = play_both(requests, after, aborts, sizes)

    counts = num_in_flight(core)
    assert max(counts) == 2
    assert counts.count(2) > 10
    assert len(story.recordings) > 5
    reports = [output.relay for r in story.results.values() for output in r.outputs[:1]]
    assert any(report is not None and report.num_relayed_tokens for report in reports)


def test_random_chains_short_of_blocks_get_the_same_tokens() -> None:
    num_preemptions = {False: 0, True: 0}
    for seed in range(8):
        requests, after, aborts = random_programme(seed)
        stories = {}
        for overlap in num_preemptions:
            engine, core = fake_core(overlap, EngineSizes(num_blocks=40))
            stories[overlap] = play(core, requests, after, aborts, engine.check)
            num_preemptions[overlap] += core.stats().num_preemptions
        for name, result in stories[False].results.items():
            other = stories[True].results[name]
            assert (result.token_ids, result.text) == (other.token_ids, other.text)

    assert min(num_preemptions.values()) > 3
