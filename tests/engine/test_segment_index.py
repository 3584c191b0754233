from __future__ import annotations

import random
from itertools import pairwise

import pytest

from relaykv.engine.segment import Segment
from relaykv.engine.segment_index import SegmentIndex

MIN = 32


def noise(seed: int, count: int, vocab_size: int = 49_152) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(vocab_size) for _ in range(count)]


def index_of(*recordings: list[int], taints: dict[int, int] | None = None) -> SegmentIndex:
    """Recordings get the ids 0, 1, 2, ..."""
    index = SegmentIndex(MIN)
    for recording_id, token_ids in enumerate(recordings):
        index.add(recording_id, token_ids, (taints or {}).get(recording_id, 0))
    return index


def match(index: SegmentIndex, prompt: list[int], start: int = 0) -> list[Segment]:
    return index.match(prompt, start, len(prompt))


def assert_valid(
    segments: list[Segment], prompt: list[int], recordings: dict[int, list[int]], start: int
) -> None:
    """Segments are disjoint, in order, long enough, and say the same as their recordings."""
    for segment in segments:
        assert segment.num_tokens >= MIN
        assert segment.start >= start
        assert segment.stop <= len(prompt)
        source = recordings[segment.recording_id]
        assert segment.source_start >= 0
        assert (
            source[segment.source_start : segment.source_start + segment.num_tokens]
            == prompt[segment.start : segment.stop]
        )
    for left, right in pairwise(segments):
        assert left.stop <= right.start


def missed_runs(
    segments: list[Segment], prompt: list[int], recordings: dict[int, list[int]], start: int
) -> list[int]:
    """Brute force: starts of runs of MIN recorded tokens that lie between the segments."""
    recorded = {
        tuple(token_ids[i : i + MIN])
        for token_ids in recordings.values()
        for i in range(len(token_ids) - MIN + 1)
    }
    covered = [False] * len(prompt)
    for segment in segments:
        covered[segment.start : segment.stop] = [True] * segment.num_tokens
    return [
        i
        for i in range(start, len(prompt) - MIN + 1)
        if not any(covered[i : i + MIN]) and tuple(prompt[i : i + MIN]) in recorded
    ]


def test_a_recording_embedded_in_other_text_is_found_with_its_shift() -> None:
    said = noise(1, 200)

    found = match(index_of(said), noise(2, 57) + said + noise(3, 40))

    assert found == [Segment(57, 257, 0, 0)]
    assert found[0].shift == 57


@pytest.mark.parametrize(("head", "tail"), [(1, 0), (0, 1), (3, 5), (7, 9), (70, 90)])
def test_a_stripped_recording_is_found_from_its_first_to_its_last_remaining_token(
    head: int, tail: int
) -> None:
    said = noise(1, 200)
    rest = said[head : len(said) - tail]

    found = match(index_of(said), noise(2, 10) + rest + noise(3, 10))

    assert found == [Segment(10, 10 + len(rest), 0, head)]


def test_a_rewrite_in_the_middle_splits_a_recording_into_two_segments() -> None:
    said = noise(1, 200)
    prompt = [*said[:90], 50000, 50001, *said[101:]]

    assert match(index_of(said), prompt) == [Segment(0, 90, 0, 0), Segment(92, 191, 0, 101)]


def test_two_recordings_in_swapped_order_are_both_found() -> None:
    first, second = noise(1, 100), noise(2, 80)

    found = match(index_of(first, second), second + noise(3, 9) + first)

    assert found == [Segment(0, 80, 1, 0), Segment(89, 189, 0, 0)]


def test_two_parts_of_one_recording_in_swapped_order_are_both_found() -> None:
    said = noise(1, 100)

    found = match(index_of(said), said[50:] + said[:50])

    assert found == [Segment(0, 50, 0, 50), Segment(50, 100, 0, 0)]


def test_the_same_recording_twice_in_one_prompt_is_found_twice() -> None:
    said = noise(1, 64)

    found = match(index_of(said), said + noise(2, 5) + said)

    assert found == [Segment(0, 64, 0, 0), Segment(69, 133, 0, 0)]


def test_an_unrelated_recording_in_between_changes_nothing() -> None:
    said = noise(1, 100)
    prompt = noise(2, 30) + said

    assert match(index_of(said, noise(4, 300)), prompt) == match(index_of(said), prompt)


def test_nothing_is_found_before_the_start_nor_behind_the_stop() -> None:
    said = noise(1, 100)
    index = index_of(said)

    assert index.match(said, 40, 100) == [Segment(40, 100, 0, 40)]
    assert index.match(said, 0, 60) == [Segment(0, 60, 0, 0)]
    assert index.match(said, 69, 100) == []


@pytest.mark.parametrize(("length", "num_found"), [(MIN - 1, 0), (MIN, 1), (MIN + 1, 1)])
@pytest.mark.parametrize("offset", range(9))
def test_runs_shorter_than_the_minimum_are_left_out(
    length: int, num_found: int, offset: int
) -> None:
    said = noise(1, 100)
    prompt = noise(2, 20) + said[offset : offset + length] + noise(3, 20)

    assert len(match(index_of(said), prompt)) == num_found


def test_less_taint_wins_then_the_longer_match_then_the_older_recording() -> None:
    said = noise(1, 100)

    tainted = index_of(said, said[:60], taints={0: 1})
    assert match(tainted, said)[0] == Segment(0, 60, 1, 0)
    assert match(index_of(said[:60], said), said) == [Segment(0, 100, 1, 0)]
    assert match(index_of(said, said), said) == [Segment(0, 100, 0, 0)]


def test_a_removed_recording_is_found_no_more() -> None:
    said, other = noise(1, 100), noise(2, 100)
    index = index_of(said, other)
    assert len(match(index, said + other)) == 2

    index.remove(0)

    assert match(index, said + other) == [Segment(100, 200, 1, 0)]
    index.remove(1)
    assert match(index, said + other) == []


def test_recordings_shorter_than_the_minimum_do_no_harm() -> None:
    index = index_of([], [1], noise(1, 7), noise(2, MIN - 1))

    assert match(index, [*noise(2, MIN - 1), 1, *noise(1, 7)]) == []
    index.add(4, noise(3, 50), 0)
    assert match(index, noise(3, 50)) == [Segment(0, 50, 4, 0)]


def test_one_token_repeated_five_thousand_times_is_one_segment() -> None:
    index = index_of([7] * 5_000, [7] * 5_000)

    assert match(index, [7] * 5_000) == [Segment(0, 5_000, 0, 0)]
    assert match(index, noise(1, 100) + [7] * 4_000)[0].num_tokens == 4_000


def test_repetitive_text_with_runs_just_too_short_is_given_up_fast() -> None:
    """Every run nearly matches at thousands of places; trying them one by one takes seconds."""
    prompt = [token for i in range(160) for token in [7] * (MIN - 2) + [1_000 + i]]

    assert match(index_of([7] * 5_000), prompt) == []


@pytest.mark.parametrize("seed", range(5))
def test_text_of_a_few_recurring_phrases_hides_no_match(seed: int) -> None:
    """Logs and tables: every phrase stands at many places, only one of which goes on alike."""
    pick = random.Random(seed)
    phrases = [noise(i, 8) for i in range(12)]
    recordings = {
        i: [token for _ in range(25) for token in pick.choice(phrases)] for i in range(40)
    }
    prompt: list[int] = []
    for _ in range(8):
        begin = pick.randrange(150)
        prompt += recordings[pick.randrange(40)][begin : begin + 40] + noise(seed, 3)

    found = match(index_of(*recordings.values()), prompt)

    assert_valid(found, prompt, recordings, 0)
    assert missed_runs(found, prompt, recordings, 0) == []


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 1000])
def test_no_recorded_run_of_the_minimum_length_is_missed(seed: int, vocab_size: int) -> None:
    pick = random.Random(seed)
    recordings = {
        i: noise(1000 * seed + i, pick.randrange(150), vocab_size)
        for i in range(pick.choice((1, 30)))
    }
    prompt = noise(7777 + seed, pick.randrange(60), vocab_size)
    for _ in range(pick.randrange(6)):
        quoted = recordings[pick.randrange(len(recordings))]
        begin = pick.randrange(len(quoted) + 1)
        prompt += quoted[begin : begin + pick.choice((15, 31, 32, 33, 60, 200))]
        prompt += noise(seed, pick.randrange(20), vocab_size)
    start = pick.choice((0, 0, 16, 48))

    found = match(index_of(*recordings.values()), prompt, start)

    assert_valid(found, prompt, recordings, start)
    assert missed_runs(found, prompt, recordings, start) == []


def test_a_prompt_of_25000_tokens_against_fifty_recordings_is_covered() -> None:
    recordings = {i: noise(i, 1_000) for i in range(50)}
    prompt: list[int] = []
    for i in range(0, 50, 2):
        prompt += noise(900 + i, 40) + recordings[i][10:970]

    found = match(index_of(*recordings.values()), prompt)

    assert len(prompt) == 25_000
    assert_valid(found, prompt, recordings, 0)
    assert [segment.recording_id for segment in found] == list(range(0, 50, 2))
    assert sum(segment.num_tokens for segment in found) == 25 * 960


def test_a_minimum_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        SegmentIndex(0)
