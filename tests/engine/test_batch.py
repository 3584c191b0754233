from __future__ import annotations

from engine_factory import FakeEngine, make_request

from relaykv.engine.batch import RelayCopy


def test_the_shift_of_a_copy_is_the_new_position_minus_the_old_one() -> None:
    copy = RelayCopy(
        source_block_ids=(0, 1), source_start=3, block_ids=(2, 3), start=10, num_tokens=4
    )

    assert copy.shift == 7


def test_a_batch_counts_the_tokens_of_all_its_requests() -> None:
    engine = FakeEngine()
    engine.add(make_request("a", range(5)))
    engine.add(make_request("b", range(100, 109)))

    assert engine.step().num_scheduled_tokens == 14
    assert engine.step().num_scheduled_tokens == 2
