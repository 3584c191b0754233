from __future__ import annotations

import pytest

from relaykv.engine.block_pool import Block, BlockPool
from relaykv.engine.prefix_cache import PrefixCache, approximation_salt, block_hash, root_hash

SIZE = 16
SALT = approximation_salt("", "s", "relay")
TOKENS = list(range(100, 100 + 10 * SIZE))


def make_cache(num_blocks: int = 16) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, SIZE, "model")


def fill(
    pool: BlockPool,
    cache: PrefixCache,
    token_ids: list[int],
    salt: bytes = b"",
    num_exact: int | None = None,
    tenant: str = "",
) -> list[Block]:
    """Blocks of a finished request with `token_ids`; those behind `num_exact` are salted."""
    blocks = pool.allocate(-(-len(token_ids) // SIZE))
    parent = cache.root(tenant)
    for index in range(len(token_ids) // SIZE):
        is_exact = num_exact is None or index < num_exact
        ids = token_ids[index * SIZE : (index + 1) * SIZE]
        parent = block_hash(parent, ids, b"" if is_exact else salt)
        cache.register(blocks[index], parent)
    pool.release(blocks)
    return blocks


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(1, 0), (SIZE - 1, 0), (SIZE, 0), (SIZE + 1, 1), (2 * SIZE, 1), (2 * SIZE + 1, 2)],
)
def test_a_hit_always_leaves_a_token_to_compute(num_tokens: int, num_blocks: int) -> None:
    pool, cache = make_cache()
    blocks = fill(pool, cache, TOKENS)

    match = cache.match(TOKENS[:num_tokens], "")

    assert match.blocks == tuple(blocks[:num_blocks])
    assert match.num_exact_blocks == num_blocks == len(match.hashes)
    assert num_tokens - num_blocks * SIZE >= 1


@pytest.mark.parametrize(("num_known", "num_blocks"), [(-1, 1), (0, 2), (1, 2)])
def test_only_full_blocks_are_hit(num_known: int, num_blocks: int) -> None:
    pool, cache = make_cache()
    fill(pool, cache, TOKENS[: 2 * SIZE + num_known])

    assert len(cache.match(TOKENS, "").blocks) == num_blocks


@pytest.mark.parametrize("position", [0, SIZE - 1, SIZE, 2 * SIZE - 1])
def test_a_token_that_differs_ends_the_hit_in_front_of_its_block(position: int) -> None:
    pool, cache = make_cache()
    fill(pool, cache, TOKENS)
    prompt = list(TOKENS)
    prompt[position] = 7

    assert len(cache.match(prompt, "").blocks) == position // SIZE


def test_the_same_block_behind_another_start_is_not_hit() -> None:
    pool, cache = make_cache()
    fill(pool, cache, TOKENS)

    assert cache.match(TOKENS[SIZE:], "").blocks == ()


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool, cache = make_cache(num_blocks=32)
    first = fill(pool, cache, TOKENS)
    second = fill(pool, cache, TOKENS)

    assert cache.match(TOKENS, "").blocks == tuple(first[:9])
    assert all(block.hash is None for block in second)


def test_a_reused_block_is_hit_no_more_and_neither_is_what_follows() -> None:
    pool, cache = make_cache(num_blocks=10)
    blocks = fill(pool, cache, TOKENS)

    pool.hold(blocks[:3])  # so that the tail is reused, up to the fourth block
    pool.release(pool.allocate(7))

    assert cache.match(TOKENS, "").blocks == tuple(blocks[:3])


def test_a_name_is_free_again_after_its_block_was_reused() -> None:
    pool, cache = make_cache(num_blocks=10)
    fill(pool, cache, TOKENS)
    pool.release(pool.allocate(10))
    assert cache.match(TOKENS, "").blocks == ()

    again = fill(pool, cache, TOKENS)

    assert cache.match(TOKENS, "").blocks == tuple(again[:9])


def test_tenants_and_models_never_share() -> None:
    pool, cache = make_cache()
    fill(pool, cache, TOKENS, tenant="a")

    assert cache.match(TOKENS, "b").blocks == ()
    assert cache.match(TOKENS, "").blocks == ()
    assert len(cache.match(TOKENS, "a").blocks) == 9
    assert root_hash("model", "a") != root_hash("other", "a")


def test_approximate_blocks_are_hit_only_under_their_own_salt() -> None:
    pool, cache = make_cache()
    blocks = fill(pool, cache, TOKENS, SALT, num_exact=2)

    assert cache.match(TOKENS, "").blocks == tuple(blocks[:2])
    for other in (("", "s", "shift"), ("", "t", "relay"), ("b", "s", "relay")):
        match = cache.match(TOKENS, "", approximation_salt(*other))
        assert match.blocks == tuple(blocks[:2])
        assert match.num_exact_blocks == 2
    match = cache.match(TOKENS, "", SALT)
    assert match.blocks == tuple(blocks[:9])
    assert match.num_exact_blocks == 2


def test_the_salt_of_a_session_opens_nothing_to_another_tenant() -> None:
    pool, cache = make_cache()
    fill(pool, cache, TOKENS, SALT, num_exact=0)

    assert cache.match(TOKENS, "b", SALT).blocks == ()


def test_approximate_blocks_may_start_at_the_first_block() -> None:
    pool, cache = make_cache()
    blocks = fill(pool, cache, TOKENS, SALT, num_exact=0)

    assert cache.match(TOKENS, "").blocks == ()
    match = cache.match(TOKENS, "", SALT)
    assert match.blocks == tuple(blocks[:9])
    assert match.num_exact_blocks == 0


def test_nothing_exact_follows_an_approximate_block() -> None:
    pool, cache = make_cache(num_blocks=32)
    approximate = fill(pool, cache, TOKENS[: 3 * SIZE], SALT, num_exact=1)
    exact = fill(pool, cache, TOKENS)

    match = cache.match(TOKENS[: 5 * SIZE + 1], "", SALT)

    # The exact hit is longer, so it wins whole; the two are never mixed back.
    assert match.num_exact_blocks == 5
    assert not set(match.blocks) & set(approximate[1:])
    # Block 0 was named by the first fill; the rest of the exact chain by the second.
    assert match.blocks == (approximate[0], *exact[1:5])


def test_the_longer_hit_wins_and_exact_wins_a_draw() -> None:
    pool, cache = make_cache(num_blocks=32)
    exact = fill(pool, cache, TOKENS[: 3 * SIZE])
    approximate = fill(pool, cache, TOKENS[: 4 * SIZE], SALT, num_exact=1)

    draw = cache.match(TOKENS[: 3 * SIZE + 1], "", SALT)
    assert draw.blocks == tuple(exact[:3])
    assert draw.num_exact_blocks == 3
    longer = cache.match(TOKENS, "", SALT)
    assert longer.blocks == (exact[0], *approximate[1:4])
    assert longer.num_exact_blocks == 1


def test_an_approximate_tail_may_leave_the_exact_chain_anywhere() -> None:
    pool, cache = make_cache(num_blocks=32)
    exact = fill(pool, cache, TOKENS[: 4 * SIZE])
    approximate = fill(pool, cache, TOKENS[: 6 * SIZE], SALT, num_exact=4)

    match = cache.match(TOKENS, "", SALT)

    assert match.blocks == (*exact, *approximate[4:6])
    assert match.num_exact_blocks == 4


def test_a_salt_is_not_confused_with_tokens() -> None:
    assert block_hash(b"p", [1, 2]) != block_hash(b"p", [2], b"\1\0\0\0")
    assert block_hash(b"p", [1]) != block_hash(b"p", [1], b"x")
    assert block_hash(b"p", [1, 2]) == block_hash(b"p", (1, 2))
