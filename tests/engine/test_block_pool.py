from __future__ import annotations

import random

import pytest

from relaykv.engine.block_pool import Block, BlockCounts, BlockPool, OutOfBlocksError


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def named(pool: BlockPool, count: int) -> list[Block]:
    """Blocks of a running request, each with a name."""
    blocks = pool.allocate(count)
    for block in blocks:
        block.hash = bytes([block.id])
    return blocks


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(5)

    assert pool.num_blocks == pool.num_idle == 5
    assert pool.counts() == BlockCounts(free=5, cached=0, recorded=0, used=0)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_allocated_blocks_are_distinct_and_used_until_released() -> None:
    pool = BlockPool(5)

    blocks = pool.allocate(3)

    assert len(set(ids(blocks))) == 3
    assert pool.counts() == BlockCounts(free=2, cached=0, recorded=0, used=3)
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=5, cached=0, recorded=0, used=0)


def test_asking_for_more_than_is_idle_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)

    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 idle"):
        pool.allocate(3)

    assert pool.num_idle == 2
    assert len(pool.allocate(2)) == 2


def test_a_block_that_two_requests_hold_stays_used_until_both_let_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.hold(blocks)

    pool.release(blocks)
    assert pool.counts().used == 1
    pool.release(blocks)
    assert pool.counts().used == 0


def test_a_released_block_with_a_name_is_cached_and_can_be_held_again() -> None:
    pool = BlockPool(2)
    blocks = named(pool, 1)
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=1, cached=1, recorded=0, used=0)

    pool.hold(blocks)

    assert pool.counts() == BlockCounts(free=1, cached=0, recorded=0, used=1)
    assert blocks[0].hash is not None
    assert pool.allocate(1) != blocks


def test_a_recorded_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.record(blocks)
    pool.release(blocks)

    assert pool.counts() == BlockCounts(free=2, cached=0, recorded=1, used=0)
    assert not set(ids(pool.allocate(2))) & set(ids(blocks))
    pool.unrecord(blocks)
    assert pool.counts() == BlockCounts(free=1, cached=0, recorded=0, used=2)


def test_a_recorded_block_that_a_request_holds_counts_as_used() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.record(blocks)

    assert pool.counts() == BlockCounts(free=0, cached=0, recorded=0, used=1)
    pool.unrecord(blocks)
    assert pool.counts().used == 1
    assert pool.num_idle == 0


def test_unnamed_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = named(pool, 2)
    unnamed = pool.allocate(2)
    pool.release(cached)
    pool.release(unnamed)

    assert set(ids(pool.allocate(2))) == set(ids(unnamed))


def test_the_least_recently_used_cached_blocks_are_reused_first() -> None:
    pool = BlockPool(4)
    first, second = named(pool, 2), named(pool, 2)
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    pool.release(first)

    assert set(ids(pool.allocate(2))) == set(ids(second))


def test_the_tail_of_a_cached_sequence_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = named(pool, 3)
    pool.release(blocks)

    assert ids(pool.allocate(3)) == ids(blocks)[::-1]


def test_the_tail_of_an_evicted_recording_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = named(pool, 3)
    pool.record(blocks)
    pool.release(blocks)
    pool.unrecord(blocks)

    assert ids(pool.allocate(3)) == ids(blocks)[::-1]


def test_reusing_a_named_block_tells_the_listener_and_clears_the_name() -> None:
    pool = BlockPool(2)
    forgotten: list[bytes | None] = []
    pool.call_on_evict(lambda block: forgotten.append(block.hash))
    blocks = named(pool, 1)
    name = blocks[0].hash
    pool.release(blocks)

    taken = pool.allocate(2)

    assert forgotten == [name]
    assert all(block.hash is None for block in taken)


@pytest.mark.parametrize("let_go", [BlockPool.release, BlockPool.unrecord])
def test_letting_go_of_an_unheld_block_is_a_programming_error(let_go: object) -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)

    assert callable(let_go)
    with pytest.raises(AssertionError, match="more often"):
        let_go(pool, blocks)


def test_the_four_counts_add_up_after_any_sequence_of_calls() -> None:
    pick = random.Random(0)
    pool = BlockPool(20)
    held: list[list[Block]] = []
    recorded: list[list[Block]] = []
    for _ in range(2_000):
        action = pick.randrange(5)
        if action == 0:
            blocks = pool.allocate(pick.randint(0, min(4, pool.num_idle)))
            for block in blocks:
                block.hash = bytes([block.id]) if pick.random() < 0.5 else None
            held.append(blocks)
        elif action == 1 and held:
            pool.release(held.pop(pick.randrange(len(held))))
        elif action == 2 and held:
            recorded.append(pick.choice(held))
            pool.record(recorded[-1])
        elif action == 3 and recorded:
            pool.unrecord(recorded.pop(pick.randrange(len(recorded))))
        elif action == 4 and recorded:
            held.append(pick.choice(recorded))
            pool.hold(held[-1])
        counts = pool.counts()
        in_use = {block.id for blocks in held for block in blocks}
        kept = {block.id for blocks in recorded for block in blocks}
        assert counts.used == len(in_use)
        assert counts.recorded == len(kept - in_use)
        assert counts.free + counts.cached == pool.num_idle == 20 - len(in_use | kept)
