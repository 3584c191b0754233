from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from relaykv.engine import anchor_pools
from relaykv.engine.anchor_pools import (
    MAX_ANCHORS,
    Anchor,
    AnchorPools,
    AnchorVerdict,
    judge_anchors,
)
from relaykv.engine.block_pool import BlockPool
from relaykv.engine.handoff_slots import HandoffKey
from relaykv.engine.recording import RecordingStore, SessionKey

BLOCK_SIZE = 4
NUM_TOKENS = 10
USED = "whatever corrected it"


class World:
    """A pool of blocks with recordings, which anchors are made from."""

    def __init__(self, num_blocks: int = 400, max_blocks: int = 300) -> None:
        self.pool = BlockPool(num_blocks)
        self.recordings = RecordingStore(self.pool, 4)
        self.pools = AnchorPools(self.pool, self.recordings, BLOCK_SIZE, max_blocks)
        self._count = 0

    def add(self, key: HandoffKey, num_tokens: int = NUM_TOKENS) -> Anchor | None:
        """An anchor of a text that nothing else holds, from the second slot of its blocks on."""
        base = self.pool.allocate(-(-(num_tokens + 1) // BLOCK_SIZE))
        self._count += 1
        tokens = [self._count * 100 + number for number in range(num_tokens)]
        anchor = self.pools.add(key, tokens, base, 5 * BLOCK_SIZE + 1)
        self.pool.release(base)
        return anchor

    def record(self, num_blocks: int) -> None:
        blocks = self.pool.allocate(num_blocks)
        self._count += 1
        tokens = tuple(self._count * 1000 + number for number in range(num_blocks * BLOCK_SIZE))
        self.recordings.add(f"r{self._count}", SessionKey("", "s"), tokens, blocks, 1, 0)
        self.pool.release(blocks)


def key(receiver: str = "critic") -> HandoffKey:
    return HandoffKey("", receiver, (1, 2), "writer")


def some_anchors(count: int) -> list[Anchor]:
    return [Anchor((number,), (), 0, ()) for number in range(count)]


def used(anchors: Sequence[Anchor]) -> AnchorVerdict:
    return AnchorVerdict(tuple(anchors), USED, tuple(anchors))


def test_an_anchor_keeps_its_base_and_has_offset_blocks_of_its_own() -> None:
    world = World()
    anchor = world.add(key())
    assert anchor is not None
    assert len(anchor.base_blocks) == len(anchor.offset_blocks) == 3
    assert not {b.id for b in anchor.base_blocks} & {b.id for b in anchor.offset_blocks}
    assert world.pools.num_blocks == 6
    assert world.pool.counts().recorded == 6
    assert world.pool.counts().used == 0
    assert anchor.place.base_start == 1
    world.pools.forget(key(), anchor)
    assert world.pool.num_idle == world.pool.num_blocks
    assert world.pools.num_blocks == 0


def test_readers_of_one_recording_share_its_blocks() -> None:
    world = World()
    base = world.pool.allocate(3)
    for receiver in ("critic", "editor"):
        assert world.pools.add(key(receiver), range(NUM_TOKENS), base, 0) is not None
    world.pool.release(base)
    assert world.pools.num_blocks == 3 + 2 * 3
    world.pools.forget(key("critic"), world.pools.anchors(key("critic"))[0])
    assert world.pools.num_blocks == 6
    assert world.pool.counts().recorded == 6


def test_a_full_pool_drops_the_least_used_of_its_five_oldest() -> None:
    world = World()
    anchors = [world.add(key()) for _ in range(MAX_ANCHORS)]
    kept = [anchor for anchor in anchors if anchor is not None]
    world.pools.meet(key(), used([*kept[:3], kept[4]]))  # nor the sixth and later ones
    world.add(key())
    assert world.pools.num_anchors == MAX_ANCHORS
    assert kept[3] not in world.pools.anchors(key())
    world.add(key())  # now the sixth is among the oldest five, and unused
    assert kept[5] not in world.pools.anchors(key())
    assert world.pools.anchors(key())[:4] == (*kept[:3], kept[4])


def test_kinds_have_pools_of_their_own() -> None:
    world = World()
    world.add(key("critic"))
    world.add(key("editor"))
    assert len(world.pools.anchors(key("critic"))) == 1
    assert world.pools.anchors(key("judge")) == ()


def test_their_share_of_the_cache_bounds_all_anchors_together() -> None:
    world = World(max_blocks=15)
    assert world.add(key("critic")) is not None
    assert world.add(key("editor")) is not None
    assert world.add(key("judge")) is None
    assert world.pools.num_refused == 1
    assert world.pools.num_blocks == 12
    assert world.pool.counts().used == 0


def test_a_kind_that_was_not_met_for_long_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_pools, "_STALE_HANDOFFS", 3)
    world = World(max_blocks=15)
    world.add(key("critic"))
    world.add(key("editor"))
    for count in range(3):
        assert (world.add(key("judge")) is None) is (count < 3)
        world.pools.meet(key("editor"), used(()))
    assert world.add(key("judge")) is not None
    assert world.pools.anchors(key("critic")) == ()
    assert len(world.pools.anchors(key("editor"))) == 1


def test_recordings_give_way_to_an_anchor_and_other_anchors_do_not() -> None:
    world = World(num_blocks=20, max_blocks=20)
    world.record(8)
    world.record(6)
    first = world.add(key())
    assert first is not None

    def read_by(receiver: str) -> Anchor | None:
        return world.pools.add(key(receiver), first.token_ids, first.base_blocks, 1)

    assert world.pool.num_idle == 0
    assert read_by("editor") is not None
    assert len(world.recordings) == 1  # the oldest is gone
    world.pool.allocate(5)
    assert read_by("judge") is not None
    assert len(world.recordings) == 0
    assert read_by("author") is not None
    assert world.pool.num_idle == 0
    assert read_by("printer") is None
    assert world.pools.num_anchors == 4


def test_recordings_do_not_give_way_where_that_is_of_no_use() -> None:
    world = World(num_blocks=20)
    world.record(2)
    base = world.pool.allocate(18)
    assert world.pools.add(key(), range(NUM_TOKENS), base, 0) is None
    assert len(world.recordings) == 1


def test_requests_that_need_blocks_take_those_of_the_kind_longest_unmet() -> None:
    world = World(num_blocks=20)
    world.add(key("critic"))
    world.add(key("editor"))
    world.pools.meet(key("critic"), used(()))
    assert world.pools.evict_until(10)
    assert world.pools.anchors(key("editor")) == ()
    assert len(world.pools.anchors(key("critic"))) == 1
    assert world.pools.evict_until(20)
    assert not world.pools.evict_until(21)


def test_an_anchor_that_went_before_its_use_is_not_counted() -> None:
    world = World()
    anchor = world.add(key())
    assert anchor is not None
    world.add(key())
    world.pools.forget(key(), anchor)
    world.pools.meet(key(), used([anchor]))
    assert world.pools.num_anchors == 1


def test_the_gate_passes_when_one_anchor_stands_out() -> None:
    anchors = some_anchors(4)
    verdict = judge_anchors(anchors, [650.0, 607.0, 659.0, 640.0], 0.3)
    assert verdict.anchors == tuple(anchors)
    assert verdict.used == (anchors[1],)


def test_the_gate_refuses_when_all_are_as_far() -> None:
    verdict = judge_anchors(some_anchors(4), [3.0, 3.1, 3.0, 3.2], 0.3)
    assert verdict.anchors == ()
    assert "none of 4 anchors stands out: the entropy of their weights is 1.00" in verdict.why


@pytest.mark.parametrize(("gap", "passes"), [(2.9, True), (2.8, False)])
def test_the_bound_is_three_tenths_of_the_most_that_the_entropy_can_be(
    gap: float, passes: bool
) -> None:
    share = 1 / (1 + math.exp(-gap))
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share)) / math.log(2)
    assert (entropy <= 0.3) is passes
    assert bool(judge_anchors(some_anchors(2), [5.0, 5.0 + gap], 0.3).anchors) is passes


def test_anchors_are_used_that_together_weigh_nine_tenths() -> None:
    anchors = some_anchors(60)
    distances = [500.0] * 58 + [100.0, 101.0]
    assert judge_anchors(anchors, distances, 0.3).used == (anchors[58], anchors[59])


def test_a_bound_of_one_lets_everything_pass() -> None:
    assert len(judge_anchors(some_anchors(3), [7.0, 7.0, 7.0], 1.0).anchors) == 3


def test_distances_that_are_no_numbers_refuse() -> None:
    assert judge_anchors(some_anchors(2), [math.nan, math.nan], 0.3).anchors == ()
    assert judge_anchors(some_anchors(2), [math.inf, math.inf], 0.3).anchors == ()
