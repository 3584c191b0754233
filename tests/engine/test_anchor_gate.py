from __future__ import annotations

from collections.abc import Sequence

import pytest

from relaykv.engine.anchor_gate import AnchorGate, Handoff
from relaykv.engine.anchor_pools import AnchorPools
from relaykv.engine.batch import AnchorQuery
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.handoff_slots import HandoffKey
from relaykv.engine.recording import RecordingStore

KEY = HandoffKey("", "critic", (1, 2), "writer")


class Meter:
    """Says what it is told to, and keeps what it was asked."""

    def __init__(self, *distances: float) -> None:
        self.distances = list(distances)
        self.asked: list[AnchorQuery] = []

    def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
        assert queries
        self.asked += queries
        return [self.distances[: len(query.anchors)] for query in queries]


def text(number: int, num_tokens: int = 20) -> tuple[int, ...]:
    return tuple(range(number * 100, number * 100 + num_tokens))


def handoff(token_ids: tuple[int, ...], key: HandoffKey = KEY) -> Handoff:
    return Handoff(key, token_ids, (7, 8, 9), 3)


@pytest.fixture
def pools() -> AnchorPools:
    pool = BlockPool(100)
    return AnchorPools(pool, RecordingStore(pool, 8), 4, 100)


def add(pools: AnchorPools, token_ids: tuple[int, ...], key: HandoffKey = KEY) -> None:
    assert pools.add(key, token_ids, (), 0) is not None


def test_the_first_two_texts_are_computed_without_asking_the_device(pools: AnchorPools) -> None:
    meter = Meter()
    gate = AnchorGate(pools, meter, 0.3, 2)
    for number in range(2):
        (verdict,) = gate.judge([handoff(text(number))])
        assert verdict.anchors == ()
        assert f"kind of hand-off: {number}; 2 are needed" in verdict.why
        add(pools, text(number))
    assert meter.asked == []


def test_a_text_that_is_an_anchor_is_corrected_by_its_own_offsets_alone(pools: AnchorPools) -> None:
    add(pools, text(1))
    add(pools, text(2))
    meter = Meter()
    (verdict,) = AnchorGate(pools, meter, 0.3, 2).judge([handoff(text(2)[:15])])
    assert verdict.anchors == verdict.used == (pools.anchors(KEY)[1],)
    assert meter.asked == []


def test_a_text_longer_than_the_anchors_is_computed(pools: AnchorPools) -> None:
    add(pools, text(1))
    add(pools, text(2, 30))
    meter = Meter()
    (verdict,) = AnchorGate(pools, meter, 0.3, 2).judge([handoff(text(3, 21))])
    assert verdict.anchors == ()
    assert "kind of hand-off: 2, as long as this text: 1" in verdict.why
    assert meter.asked == []


def test_only_anchors_that_are_long_enough_are_measured(pools: AnchorPools) -> None:
    for number, length in ((1, 20), (2, 30), (3, 25)):
        add(pools, text(number, length))
    meter = Meter(10.0, 20.0)
    (verdict,) = AnchorGate(pools, meter, 0.3, 2).judge([handoff(text(4, 22))])
    assert verdict.anchors == pools.anchors(KEY)[1:]
    (query,) = meter.asked
    assert (query.source_block_ids, query.source_start, query.num_tokens) == ((7, 8, 9), 3, 22)
    assert query.anchors == tuple(anchor.place for anchor in pools.anchors(KEY)[1:])


def test_segments_are_judged_one_by_one_and_measured_together(pools: AnchorPools) -> None:
    other = HandoffKey("", "critic", (5,), "writer")
    for number in range(2):
        add(pools, text(number))
        add(pools, text(number + 5), other)
    calls: list[int] = []

    class Counting(Meter):
        def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
            calls.append(len(queries))
            return [[10.0, 20.0], [10.0, 10.0]]

    verdicts = AnchorGate(pools, Counting(), 0.3, 2).judge(
        [handoff(text(8)), handoff(text(9), other), handoff(text(0))]
    )
    assert [bool(verdict.anchors) for verdict in verdicts] == [True, False, True]
    assert calls == [2]


def test_a_request_that_asks_again_is_measured_again_only_when_anchors_have_changed(
    pools: AnchorPools,
) -> None:
    add(pools, text(0))
    add(pools, text(1))
    meter = Meter(10.0, 20.0, 30.0)
    gate = AnchorGate(pools, meter, 0.3, 2)
    first = gate.judge([handoff(text(4))])
    assert gate.judge([handoff(text(4))]) == first
    assert len(meter.asked) == 1
    add(pools, text(2))
    assert len(gate.judge([handoff(text(4))])[0].anchors) == 3
    assert len(meter.asked) == 2


def test_one_anchor_may_not_do(pools: AnchorPools) -> None:
    with pytest.raises(ValueError, match="at least 2 anchors have to correct a segment, not 1"):
        AnchorGate(pools, Meter(), 0.3, 1)
