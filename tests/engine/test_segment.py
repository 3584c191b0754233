from __future__ import annotations

import pytest

from relaykv.engine.segment import Segment

SEGMENT = Segment(start=100, stop=150, recording_id=3, source_start=20)


def test_the_shift_is_the_new_position_minus_the_old_one() -> None:
    assert SEGMENT.shift == 80
    assert Segment(10, 20, 0, 15).shift == -5
    assert SEGMENT.num_tokens == 50


@pytest.mark.parametrize(
    ("start", "stop", "clipped"),
    [
        (0, 1000, SEGMENT),
        (100, 150, SEGMENT),
        (110, 1000, Segment(110, 150, 3, 30)),
        (0, 149, Segment(100, 149, 3, 20)),
        (110, 120, Segment(110, 120, 3, 30)),
    ],
)
def test_clipping_keeps_the_source_in_step(start: int, stop: int, clipped: Segment) -> None:
    assert SEGMENT.clip(start, stop) == clipped
    assert clipped.shift == SEGMENT.shift


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 20), (150, 200), (180, 200), (120, 120)])
def test_clipping_to_a_range_outside_leaves_nothing(start: int, stop: int) -> None:
    part = SEGMENT.clip(start, stop)

    assert part.num_tokens == 0
    assert SEGMENT.start <= part.start <= SEGMENT.stop
