"""Runs of a prompt's tokens: as plain values, and from a whole engine on a tiny model."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tiny_core import Result, ids, request, run, tiny_core

from relaykv.engine.policy import Policy
from relaykv.engine.prefill_plan import plan_prefill
from relaykv.engine.provenance import prompt_runs
from relaykv.engine.relay_report import PromptRun, RelayReport, RunKind, RunSource
from relaykv.engine.segment import Segment

POLICY = Policy("p", relays=True)


def run_of(kind: RunKind, start: int, stop: int, source_start: int, source: str = "w") -> PromptRun:
    return PromptRun(kind, start, stop, RunSource(source, source_start))


def runs_of(
    segments: list[Segment], sources: list[RunSource], recomputed: dict[int, tuple[int, ...]]
) -> tuple[PromptRun, ...]:
    """Of a prompt of 100 tokens with a prefix hit of 16."""
    plan = plan_prefill(100, 16, segments, 1, lambda _: POLICY)
    return prompt_runs(plan, sources, recomputed)


def test_a_prompt_without_relay_is_prefix_and_computed() -> None:
    assert runs_of([], [], {}) == (
        PromptRun(RunKind.PREFIX, 0, 16),
        PromptRun(RunKind.COMPUTED, 16, 100),
    )


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [
        pytest.param({}, [(RunKind.RELAYED, 20, 26, 3)], id="nothing"),
        pytest.param({20: ()}, [(RunKind.RELAYED, 20, 26, 3)], id="looked at and not repaired"),
        pytest.param({20: tuple(range(6))}, [(RunKind.RECOMPUTED, 20, 26, 3)], id="all"),
        pytest.param(
            {20: (0, 1)},
            [(RunKind.RECOMPUTED, 20, 22, 3), (RunKind.RELAYED, 22, 26, 5)],
            id="the head",
        ),
        pytest.param(
            {20: (5,)},
            [(RunKind.RELAYED, 20, 25, 3), (RunKind.RECOMPUTED, 25, 26, 8)],
            id="the last",
        ),
        pytest.param(
            {20: (1,), 22: (0, 3)},
            [
                (RunKind.RELAYED, 20, 21, 3),
                (RunKind.RECOMPUTED, 21, 23, 4),
                (RunKind.RELAYED, 23, 25, 6),
                (RunKind.RECOMPUTED, 25, 26, 8),
            ],
            id="across the border of two chunks",
        ),
    ],
)
def test_a_segment_is_cut_where_it_was_computed_again(
    recomputed: dict[int, tuple[int, ...]], expected: list[tuple[RunKind, int, int, int]]
) -> None:
    runs = runs_of([Segment(20, 26, 1, 3)], [RunSource("w", 3)], recomputed)

    assert runs[2:-1] == tuple(run_of(*each) for each in expected)


def test_segments_that_touch_are_one_run_only_when_their_sources_do() -> None:
    segments = [Segment(20, 30, 1, 0), Segment(30, 40, 1, 10), Segment(40, 50, 1, 7)]
    segments.append(Segment(50, 60, 2, 17))
    sources = [RunSource("w", 0), RunSource("w", 10), RunSource("w", 7), RunSource("v", 17)]

    assert runs_of(segments, sources, {})[2:-1] == (
        run_of(RunKind.RELAYED, 20, 40, 0),
        run_of(RunKind.RELAYED, 40, 50, 7),
        run_of(RunKind.RELAYED, 50, 60, 17, "v"),
    )


def test_every_relayed_span_needs_its_source() -> None:
    with pytest.raises(ValueError, match="shorter"):
        runs_of([Segment(20, 30, 1, 0)], [], {})


@pytest.mark.parametrize("seed", range(30))
def test_runs_say_of_every_token_what_was_said_of_it(seed: int) -> None:
    pick = random.Random(seed)
    num_tokens = pick.randrange(40, 200)
    borders = sorted(pick.sample(range(1, num_tokens), 6))
    segments, sources = [], []
    for start, stop in zip(borders[::2], borders[1::2], strict=True):
        segments.append(Segment(start, stop, 1, pick.randrange(100)))
        sources.append(RunSource(pick.choice("vw"), segments[-1].source_start))
    plan = plan_prefill(num_tokens, 0, segments, 1, lambda _: POLICY)
    computed: tuple[RunKind, RunSource | None] = (RunKind.COMPUTED, None)
    expected = dict.fromkeys(range(num_tokens), computed)
    recomputed = {}
    for segment, source in zip(segments, sources, strict=True):
        length = segment.num_tokens
        chosen = tuple(sorted(pick.sample(range(length), pick.randrange(length + 1))))
        recomputed[segment.start] = chosen
        for offset in range(length):
            kind = RunKind.RECOMPUTED if offset in chosen else RunKind.RELAYED
            place = RunSource(source.request_id, source.start + offset)
            expected[segment.start + offset] = (kind, place)

    runs = prompt_runs(plan, sources, recomputed)

    assert by_token(runs) == expected
    assert [0, *(each.stop for each in runs)] == [*(each.start for each in runs), num_tokens]
    for run_before, run_behind in pairwise(runs):  # and no two of them could be one
        joined = PromptRun(run_before.kind, run_before.start, run_behind.stop, run_before.source)
        assert by_token((joined,)) != by_token((run_before, run_behind))


def by_token(runs: tuple[PromptRun, ...]) -> dict[int, tuple[RunKind, RunSource | None]]:
    said: dict[int, tuple[RunKind, RunSource | None]] = {}
    for each in runs:
        for position in range(each.start, each.stop):
            place = each.source
            if place is not None:
                place = RunSource(place.request_id, place.start + position - each.start)
            assert position not in said
            said[position] = (each.kind, place)
    return said


def positions(runs: tuple[PromptRun, ...], kind: RunKind) -> list[int]:
    return [p for each in runs if each.kind is kind for p in range(each.start, each.stop)]


def handed_off(policy: str, budget: int = 64) -> tuple[Result, int]:
    """A consumer whose prompt holds 60 tokens of a producer from 47 on; that prompt's length."""
    core = tiny_core(max_num_batched_tokens=budget)
    prompt = ids(7, 47)
    run(core, request("other", prompt, 1))  # the consumer's first two blocks are a prefix hit
    (producer,) = run(core, request("producer", ids(6, 33), 61, session="s"))
    prompt = [*prompt, *producer.token_ids[:60], *ids(8, 12)]
    (consumer,) = run(core, request("consumer", prompt, 3, session="s", policy=policy))
    return consumer, len(prompt)


def check(report: RelayReport, num_tokens: int) -> None:
    """Runs cover the prompt, in order, and agree with the counts and with the segment."""
    assert [0, *(each.stop for each in report.runs)] == [
        *(each.start for each in report.runs),
        num_tokens,
    ]
    counts = {kind: len(positions(report.runs, kind)) for kind in RunKind}
    assert counts == {
        RunKind.PREFIX: report.num_prefix_tokens,
        RunKind.RELAYED: report.num_relayed_tokens,
        RunKind.RECOMPUTED: report.num_recomputed_tokens,
        RunKind.COMPUTED: report.num_computed_tokens,
    }
    assert positions(report.runs, RunKind.PREFIX) == list(range(32))
    assert positions(report.runs, RunKind.COMPUTED) == [*range(32, 47), *range(107, num_tokens)]
    for each in report.runs:
        relayed = each.kind in (RunKind.RELAYED, RunKind.RECOMPUTED)
        # The answer stood in the producer's recording from token 33 on.
        assert each.source == (RunSource("producer", each.start - 47 + 33) if relayed else None)


@pytest.mark.parametrize("budget", [64, 16], ids=["whole", "in chunks"])
@pytest.mark.parametrize("policy", ["shift", "epic", "cacheblend", "relay"])
def test_the_runs_of_a_handoff_agree_with_its_counts_and_its_policy(
    policy: str, budget: int
) -> None:
    consumer, num_tokens = handed_off(policy, budget)

    check(consumer.relay, num_tokens)
    assert consumer.outputs[0].relay == consumer.relay
    recomputed = positions(consumer.relay.runs, RunKind.RECOMPUTED)
    if policy == "shift":
        assert recomputed == []
    elif policy == "epic":
        assert recomputed == list(range(47, 63))
    elif policy == "relay":
        assert recomputed[-10:] == list(range(97, 107))
    elif budget == 64:
        assert len(recomputed) == 9  # 15 % of 60
    else:
        assert 9 <= len(recomputed) <= 13  # rounded up in every chunk


def test_a_prompt_computed_in_full_is_one_run() -> None:
    (result,) = run(tiny_core(), request("a", ids(1, 90), 2, session="s"))

    assert result.relay.runs == (PromptRun(RunKind.COMPUTED, 0, 90),)
