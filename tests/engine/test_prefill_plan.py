from __future__ import annotations

import itertools
import random

import pytest

from relaykv.engine.policy import Bands, Policy, Selection
from relaykv.engine.prefill_plan import PrefillPlan, Span, SpanKind, plan_prefill
from relaykv.engine.segment import Segment

MIN = 8


def costing(share: float) -> Policy:
    """A policy whose relayed tokens cost a share of computed ones, on a model of one layer."""
    return Policy("p", True, Bands(0, 0, 0), Selection(expected_share=share))


def relayed(_: Segment) -> Policy:
    return costing(0.5)


def kinds(plan: PrefillPlan) -> list[tuple[str, int, int]]:
    return [(span.kind.value, span.start, span.stop) for span in plan.spans]


def test_a_prompt_without_reuse_is_computed() -> None:
    plan = plan_prefill(10, 0, [], MIN, relayed)

    assert kinds(plan) == [("compute", 0, 10)]
    assert plan.num_tokens == 10


def test_spans_come_in_order_and_what_is_between_them_is_computed() -> None:
    segments = [Segment(20, 40, 1, 5), Segment(40, 60, 2, 0), Segment(70, 99, 1, 30)]

    plan = plan_prefill(100, 16, segments, MIN, relayed)

    assert kinds(plan) == [
        ("prefix", 0, 16),
        ("compute", 16, 20),
        ("relay", 20, 40),
        ("relay", 40, 60),
        ("compute", 60, 70),
        ("relay", 70, 99),
        ("compute", 99, 100),
    ]
    assert plan.count(SpanKind.PREFIX) == 16
    assert plan.count(SpanKind.RELAY) == 69
    assert plan.count(SpanKind.COMPUTE) == 15


def test_the_last_token_is_computed_even_when_a_segment_reaches_it() -> None:
    plan = plan_prefill(50, 0, [Segment(10, 50, 1, 0)], MIN, relayed)

    assert kinds(plan)[-2:] == [("relay", 10, 49), ("compute", 49, 50)]
    assert plan.spans[-2].segment == Segment(10, 49, 1, 0)


def test_a_segment_that_the_prefix_overlaps_is_clipped_with_its_source() -> None:
    plan = plan_prefill(50, 16, [Segment(10, 40, 1, 100)], MIN, relayed)

    assert kinds(plan) == [("prefix", 0, 16), ("relay", 16, 40), ("compute", 40, 50)]
    assert plan.spans[1].segment == Segment(16, 40, 1, 106)


@pytest.mark.parametrize(
    ("stop", "is_relayed"), [(16 + MIN - 1, False), (16 + MIN, True), (16 + MIN + 1, True)]
)
def test_what_clipping_leaves_below_the_minimum_is_computed(stop: int, is_relayed: bool) -> None:
    plan = plan_prefill(100, 16, [Segment(4, stop, 1, 0)], MIN, relayed)

    assert (plan.count(SpanKind.RELAY) > 0) is is_relayed


def test_a_segment_inside_the_prefix_is_dropped() -> None:
    assert plan_prefill(50, 32, [Segment(4, 30, 1, 0)], MIN, relayed).count(SpanKind.RELAY) == 0


@pytest.mark.parametrize("seed", range(50))
def test_spans_cover_any_prompt_exactly_once_and_the_last_token_is_computed(seed: int) -> None:
    pick = random.Random(seed)
    num_tokens = pick.randint(1, 200)
    num_prefix = (pick.randrange(num_tokens) // 16) * 16
    borders = sorted(pick.sample(range(num_tokens + 1), min(8, num_tokens + 1)))
    segments = [
        Segment(start, stop, 1, pick.randrange(100))
        for start, stop in zip(borders[::2], borders[1::2], strict=False)
    ]

    plan = plan_prefill(num_tokens, num_prefix, segments, MIN, relayed)

    covered = [p for span in plan.spans for p in range(span.start, span.stop)]
    assert covered == list(range(num_tokens))
    assert plan.spans[-1].kind is SpanKind.COMPUTE
    assert plan.count(SpanKind.PREFIX) == num_prefix
    for span in plan.spans:
        assert span.num_tokens > 0
        assert (span.segment is not None) is (span.kind is SpanKind.RELAY)
        if span.segment is not None:
            assert span.num_tokens >= MIN
            assert (span.segment.start, span.segment.stop) == (span.start, span.stop)
            assert span.segment.shift in {segment.shift for segment in segments}


@pytest.mark.parametrize("seed", range(20))
def test_relay_spans_of_consecutive_ranges_add_up_to_those_of_the_prompt(seed: int) -> None:
    pick = random.Random(seed)
    plan = plan_prefill(100, 16, [Segment(18, 50, 1, 7), Segment(60, 90, 2, 0)], MIN, relayed)
    cuts = [0, *sorted(pick.sample(range(1, 100), 4)), 100]

    parts = [
        part for start, stop in itertools.pairwise(cuts) for part in plan.relay_spans(start, stop)
    ]

    positions = [p for part in parts for p in range(part.start, part.stop)]
    assert positions == [*range(18, 50), *range(60, 90)]
    assert all(part.segment is not None and part.segment.shift in (11, 60) for part in parts)


def plan_costing(cost: float) -> PrefillPlan:
    return PrefillPlan(
        (
            Span(SpanKind.PREFIX, 0, 16),
            Span(SpanKind.COMPUTE, 16, 30),
            Span(SpanKind.RELAY, 30, 130, Segment(30, 130, 1, 0), costing(cost)),
            Span(SpanKind.COMPUTE, 130, 150),
        )
    )


@pytest.mark.parametrize(
    ("start", "budget", "cost", "stop"),
    [
        pytest.param(16, 1000, 0.5, 150, id="everything fits"),
        pytest.param(16, 84, 0.5, 150, id="everything just fits"),
        pytest.param(16, 83, 0.5, 149, id="all but one token"),
        pytest.param(16, 10, 0.5, 26, id="a part of a computed span"),
        pytest.param(16, 14, 0.5, 30, id="up to a relayed span"),
        pytest.param(16, 63, 0.5, 30, id="a relayed span behind others is not split"),
        pytest.param(16, 64, 0.5, 130, id="a relayed span that just fits"),
        pytest.param(30, 10, 0.5, 130, id="the first relayed span may overdraw"),
        pytest.param(30, 1, 0.5, 130, id="the first relayed span may overdraw from one token"),
        pytest.param(30, 0, 0.5, 30, id="nothing is left"),
        pytest.param(16, 0, 0.0, 16, id="nothing is left for a free span either"),
        pytest.param(30, -5, 0.5, 30, id="less than nothing is left"),
        pytest.param(30, 1, 0.0, 131, id="a span that costs nothing"),
        pytest.param(80, 3, 0.5, 130, id="the rest of a relayed span that was split"),
        pytest.param(130, 7, 0.5, 137, id="behind the relayed span"),
        pytest.param(149, 1, 0.5, 150, id="the last token"),
    ],
)
def test_how_far_a_chunk_goes(start: int, budget: int, cost: float, stop: int) -> None:
    assert plan_costing(cost).chunk_stop(start, budget, 100, num_layers=1) == stop


def test_a_relayed_span_is_split_only_when_it_exceeds_a_whole_step() -> None:
    assert plan_costing(0.5).chunk_stop(30, 20, 50, 1) == 130
    assert plan_costing(0.5).chunk_stop(30, 20, 49, 1) == 70
    assert plan_costing(0.5).chunk_stop(70, 49, 49, 1) == 149
    assert plan_costing(1.0).chunk_stop(30, 1, 8, 1) == 31


@pytest.mark.parametrize("cost", [0.0, 0.06, 0.3, 1.0])
@pytest.mark.parametrize("budget", [1, 3, 50])
def test_chunks_always_advance_and_end_at_the_end_of_the_prompt(cost: float, budget: int) -> None:
    plan, position, num_chunks = plan_costing(cost), 16, 0
    while position < plan.num_tokens:
        stop = plan.chunk_stop(position, budget, budget, 1)
        assert position < stop <= plan.num_tokens
        position, num_chunks = stop, num_chunks + 1
    assert num_chunks <= 134


def test_a_segment_that_no_policy_serves_is_computed() -> None:
    segments = [Segment(20, 40, 1, 5), Segment(50, 80, 2, 0)]

    plan = plan_prefill(
        100, 0, segments, MIN, lambda segment: relayed(segment) if segment.start == 50 else None
    )

    assert kinds(plan) == [("compute", 0, 50), ("relay", 50, 80), ("compute", 80, 100)]


def test_every_relayed_span_and_its_parts_know_their_policy() -> None:
    cheap, dear = costing(0.1), costing(0.9)
    segments = [Segment(20, 40, 1, 5), Segment(50, 80, 2, 0)]

    plan = plan_prefill(
        100, 0, segments, MIN, lambda segment: cheap if segment.start == 20 else dear
    )

    assert [part.policy for part in plan.relay_spans(30, 60)] == [cheap, dear]
    assert plan.spans[0].cost(num_layers=1) == 1.0
    assert plan.spans[1].cost(num_layers=1) == pytest.approx(0.1)
