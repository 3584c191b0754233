from __future__ import annotations

from dataclasses import dataclass, field

from relaykv.engine.block_pool import Block, BlockPool
from relaykv.engine.recording import RecordingStore, SessionKey
from relaykv.engine.segment import Segment

KEY = SessionKey("", "s")
SIZE = 4
NUM_BLOCKS = 20


@dataclass(slots=True)
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(slots=True)
class Shelf:
    """A store beside a pool; blocks are those of finished requests."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    clock: Clock = field(default_factory=Clock)
    store: RecordingStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = RecordingStore(self.pool, min_segment_tokens=8, now=self.clock)

    def add(
        self,
        name: str,
        token_ids: range,
        key: SessionKey = KEY,
        taint: int = 0,
        blocks: list[Block] | None = None,
    ) -> list[Block]:
        if blocks is None:
            blocks = self.pool.allocate(-(-len(token_ids) // SIZE))
        else:
            self.pool.hold(blocks)
        self.store.add(name, key, tuple(token_ids), blocks, 3, taint)
        self.pool.release(blocks)
        return blocks

    def names(self, key: SessionKey = KEY) -> list[str]:
        return [
            recording.request_id
            for found, recordings, _ in self.store.sessions(key.tenant)
            for recording in recordings
            if found == key
        ]


def test_a_recording_keeps_tokens_blocks_and_taint_findable() -> None:
    shelf = Shelf()
    blocks = shelf.add("r", range(100, 118), taint=2)

    found = shelf.store.match(KEY, [1, 2, *range(104, 116), 3], 0)

    assert len(shelf.store) == 1
    assert len(found) == 1
    recording = shelf.store[found[0].recording_id]
    assert found == [Segment(2, 14, recording.id, 4)]
    assert (recording.request_id, recording.key, recording.taint) == ("r", KEY, 2)
    assert recording.token_ids == tuple(range(100, 118))
    assert recording.blocks == tuple(blocks)
    assert recording.num_prompt_tokens == 3
    assert shelf.pool.counts().recorded == 5


def test_nothing_is_matched_in_front_of_the_start() -> None:
    shelf = Shelf()
    shelf.add("r", range(100, 120))

    assert shelf.store.match(KEY, list(range(100, 120)), 8)[0].start == 8
    assert shelf.store.match(KEY, list(range(100, 120)), 13) == []


def test_sessions_and_tenants_never_see_each_other() -> None:
    shelf = Shelf()
    shelf.add("r", range(100, 120))

    for other in (SessionKey("", "t"), SessionKey("b", "s"), SessionKey("s", "")):
        assert shelf.store.match(other, list(range(100, 120)), 0) == []
        assert not shelf.store.has_session(other)
        assert not shelf.store.delete_session(other)
    assert list(shelf.store.sessions("b")) == []


def test_a_request_without_kv_is_not_recorded() -> None:
    shelf = Shelf()
    shelf.add("r", range(0))

    assert len(shelf.store) == 0
    assert not shelf.store.has_session(KEY)


def test_a_repetition_replaces_its_recording() -> None:
    shelf = Shelf()
    shelf.add("first", range(100, 120))
    shelf.add("other", range(200, 210))
    shelf.add("second", range(100, 120))

    assert shelf.names() == ["other", "second"]
    assert len(shelf.store) == 2
    assert shelf.pool.counts().recorded == 5 + 3


def test_a_repetition_of_the_only_recording_keeps_the_session() -> None:
    shelf = Shelf()
    shelf.add("first", range(100, 120))
    shelf.add("second", range(100, 120))

    assert shelf.names() == ["second"]
    assert len(shelf.store.match(KEY, list(range(100, 120)), 0)) == 1


def test_a_repetition_may_share_blocks_with_the_recording_it_replaces() -> None:
    shelf = Shelf()
    blocks = shelf.add("first", range(100, 120))
    shelf.add("second", range(100, 120), blocks=blocks)

    assert shelf.pool.counts().recorded == 5
    assert shelf.store.delete_session(KEY)
    assert shelf.pool.num_idle == NUM_BLOCKS


def test_a_repetition_with_less_taint_replaces_its_recording() -> None:
    shelf = Shelf()
    shelf.add("tainted", range(100, 120), taint=2)
    shelf.add("exact", range(100, 120), taint=0)

    assert shelf.names() == ["exact"]


def test_a_repetition_with_more_taint_is_not_kept_however_often_it_comes() -> None:
    shelf = Shelf()
    shelf.add("exact", range(100, 120))
    for count in range(5):
        shelf.add(f"tainted {count}", range(100, 120), taint=1)

    assert shelf.names() == ["exact"]
    assert shelf.pool.counts().recorded == 5
    assert shelf.store[0].taint == 0


def test_a_recording_that_was_repeated_is_as_young_as_its_repetition() -> None:
    shelf = Shelf()
    shelf.add("exact", range(100, 120))
    shelf.add("other", range(200, 220))
    shelf.clock.seconds = 9.0
    shelf.add("tainted", range(100, 120), taint=1)

    assert shelf.store.evict_until(shelf.pool.num_idle + 1)

    assert shelf.names() == ["exact"]
    assert [last_used for _, _, last_used in shelf.store.sessions("")] == [9.0]


def test_the_same_tokens_in_two_sessions_are_two_recordings() -> None:
    shelf = Shelf()
    shelf.add("r", range(100, 120))
    shelf.add("q", range(100, 120), key=SessionKey("", "t"))

    assert len(shelf.store) == 2


def test_the_oldest_recordings_of_all_sessions_are_evicted_until_there_is_room() -> None:
    shelf = Shelf()
    other = SessionKey("", "t")
    shelf.add("a", range(100, 120))
    shelf.add("b", range(200, 220), key=other)
    shelf.add("c", range(300, 320))
    assert shelf.pool.num_idle == 5

    assert shelf.store.evict_until(5)
    assert len(shelf.store) == 3
    assert shelf.store.evict_until(11)
    assert shelf.names() == ["c"]
    assert not shelf.store.has_session(other)
    assert shelf.store.match(KEY, list(range(100, 120)), 0) == []


def test_eviction_says_when_it_could_not_make_enough_room() -> None:
    shelf = Shelf()
    blocks = shelf.add("a", range(100, 120))
    shelf.pool.hold(blocks)

    assert not shelf.store.evict_until(NUM_BLOCKS)
    assert len(shelf.store) == 0
    assert shelf.pool.counts().used == 5
    shelf.pool.release(blocks)
    assert shelf.store.evict_until(NUM_BLOCKS)


def test_blocks_that_two_recordings_share_stay_until_both_are_gone() -> None:
    shelf = Shelf()
    blocks = shelf.add("a", range(100, 120))
    other = SessionKey("", "t")
    shelf.add("b", range(100, 117), key=other, blocks=blocks)

    shelf.store.delete_session(KEY)
    assert shelf.pool.counts().recorded == 5
    shelf.store.delete_session(other)
    assert shelf.pool.counts().recorded == 0


def test_deleting_a_session_forgets_it_and_nothing_else() -> None:
    shelf = Shelf()
    other = SessionKey("", "t")
    shelf.add("a", range(100, 120))
    shelf.add("b", range(200, 220))
    shelf.add("c", range(300, 320), key=other)

    assert shelf.store.delete_session(KEY)

    assert not shelf.store.has_session(KEY)
    assert not shelf.store.delete_session(KEY)
    assert shelf.names(other) == ["c"]
    assert shelf.pool.counts().recorded == 5


def test_a_session_remembers_when_it_was_last_used() -> None:
    shelf = Shelf()
    shelf.clock.seconds = 5.0
    shelf.add("a", range(100, 120))
    assert [last_used for _, _, last_used in shelf.store.sessions("")] == [5.0]

    shelf.clock.seconds = 8.0
    shelf.store.match(KEY, [1] * 20, 0)

    assert [last_used for _, _, last_used in shelf.store.sessions("")] == [8.0]


def test_a_look_that_leaves_a_recording_out_uses_no_session() -> None:
    shelf = Shelf()
    shelf.add("a", range(10))
    shelf.clock.seconds = 7.0
    assert shelf.store.match(KEY, list(range(10)), 0, without="a") == []
    assert next(shelf.store.sessions(""))[2] == 0.0
    assert shelf.store.match(KEY, list(range(10)), 0, without="b") != []
    assert shelf.store.match(KEY, list(range(10)), 0) != []
    assert next(shelf.store.sessions(""))[2] == 7.0
