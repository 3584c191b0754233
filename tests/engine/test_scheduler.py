from __future__ import annotations

import pytest
from engine_factory import EngineSizes, FakeEngine, assert_answered, make_request

from relaykv.engine.batch import ScheduledBatch
from relaykv.engine.request import FinishReason

SAID = list(range(500, 524))


def parts(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(part.request_id, part.start, part.stop) for part in batch.requests]


def test_a_request_is_prefilled_then_decoded_token_by_token() -> None:
    engine = FakeEngine()
    request = engine.add(make_request("r", range(6), max_tokens=3))

    assert [parts(engine.step()) for _ in range(3)] == [
        [("r", 0, 6)],
        [("r", 6, 7)],
        [("r", 7, 8)],
    ]
    assert not engine.scheduler.has_work
    assert_answered(engine, request)


def test_a_long_prompt_is_prefilled_in_chunks_and_sampled_once() -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=32))
    engine.add(make_request("r", range(70), max_tokens=1))

    batches = [engine.step() for _ in range(3)]

    assert [parts(batch)[0][1:] for batch in batches] == [(0, 32), (32, 64), (64, 70)]
    assert [batch.requests[0].sampling is not None for batch in batches] == [False, False, True]
    assert not engine.scheduler.has_work


def test_decodes_go_first_and_prefills_share_what_the_budget_leaves() -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=16))
    engine.add(make_request("a", range(5), max_tokens=9))
    engine.add(make_request("b", range(100, 106), max_tokens=9))
    engine.step()
    engine.add(make_request("c", range(200, 220)))
    engine.add(make_request("d", range(300, 320)))

    assert parts(engine.step()) == [("a", 5, 6), ("b", 6, 7), ("c", 0, 14)]
    assert parts(engine.step()) == [("a", 6, 7), ("b", 7, 8), ("c", 14, 20), ("d", 0, 8)]
    engine.run()


def test_a_step_never_computes_more_than_its_budget() -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=10))
    for count in range(12):
        engine.add(make_request(f"r{count}", range(count, 9 + 3 * count), max_tokens=5))

    while engine.scheduler.has_work:
        assert engine.step().num_scheduled_tokens <= 10


def test_no_more_requests_run_than_allowed() -> None:
    engine = FakeEngine(EngineSizes(max_num_requests=3))
    for count in range(7):
        engine.add(make_request(f"r{count}", [count]))

    while engine.scheduler.has_work:
        engine.step()
        assert engine.scheduler.num_running <= 3
    assert list(engine.finished) == [f"r{count}" for count in range(7)]


def test_a_request_too_big_for_now_is_not_overtaken() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=8))
    engine.add(make_request("running", range(10), max_tokens=5))
    engine.step()
    engine.add(make_request("big", range(100, 128), max_tokens=1))
    engine.add(make_request("small", [1, 2], max_tokens=1))

    assert parts(engine.step()) == [("running", 10, 11)]
    engine.run()
    assert list(engine.finished) == ["running", "big", "small"]


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = FakeEngine()
    engine.add(make_request("r", [1]))
    assert "r" in engine.scheduler

    with pytest.raises(ValueError, match="in use"):
        engine.scheduler.add(make_request("r", [2]))

    engine.run()
    assert "r" not in engine.scheduler
    engine.serve(make_request("r", [2]))


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    engine = FakeEngine()
    told = engine.serve(make_request("r", range(9), max_tokens=6)).token_ids
    stop = told[9 + 3]

    request = make_request("q", range(9), max_tokens=6, session="s", stop_token_ids=(stop,))
    engine.serve(request)

    assert request.finish_reason is FinishReason.STOP
    assert list(request.token_ids) == told[: 9 + 3]
    assert engine.all_recordings()[0].token_ids == tuple(told[: 9 + 3])


def test_the_last_token_of_a_cut_answer_has_no_kv_and_is_not_recorded() -> None:
    engine = FakeEngine()
    request = engine.serve(make_request("r", range(9), max_tokens=6, session="s"))

    recording = engine.all_recordings()[0]
    assert request.finish_reason is FinishReason.LENGTH
    assert recording.token_ids == tuple(request.token_ids[:-1])
    assert len(recording.blocks) == 4
    assert recording.num_prompt_tokens == 9


@pytest.mark.parametrize(("session", "store"), [(None, True), ("s", False)])
def test_nothing_is_recorded_without_a_session_or_without_leave(
    session: str | None, store: bool
) -> None:
    engine = FakeEngine()
    engine.serve(make_request("r", range(20), session=session, store=store))

    assert len(engine.recordings) == 0


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 9])
def test_a_prefix_hit_changes_no_answer(num_tokens: int) -> None:
    engine = FakeEngine()
    cold = engine.serve(make_request("cold", range(num_tokens), max_tokens=6))
    warm = engine.serve(make_request("warm", range(num_tokens), max_tokens=6))

    assert warm.token_ids == cold.token_ids
    assert warm.usage().num_cached_tokens == (num_tokens - 1) // 4 * 4
    assert cold.usage().num_cached_tokens == 0


def test_a_prefix_hit_reaches_into_what_was_generated() -> None:
    engine = FakeEngine()
    first = engine.serve(make_request("first", range(5), max_tokens=12))

    second = engine.serve(make_request("second", [*first.token_ids, 1]))

    assert second.usage().num_cached_tokens == 16
    assert_answered(engine, second)


@pytest.mark.parametrize("policy", ["shift", "epic", "cacheblend", "relay"])
def test_a_relay_prefill_runs_beside_decodes_and_other_prefills(policy: str) -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=64))
    engine.serve(make_request("writer", SAID, session="s"))
    decoding = engine.add(make_request("decoding", range(6), max_tokens=9))
    engine.step()
    prompt = [1, 2, 3, *SAID, 4]
    relaying = engine.add(make_request("relaying", prompt, session="s", policy=policy))
    prefilling = engine.add(make_request("prefilling", range(100, 110)))

    batch = engine.step()

    assert parts(batch) == [("decoding", 6, 7), ("relaying", 0, 28), ("prefilling", 0, 10)]
    assert [span.start for span in batch.requests[1].relay_spans] == [3]
    assert batch.requests[0].relay_spans == batch.requests[2].relay_spans == ()
    engine.run()
    assert_answered(engine, decoding, relaying, prefilling)
    report = relaying.report(8)
    kinds = (
        report.num_prefix_tokens,
        report.num_relayed_tokens + report.num_recomputed_tokens,
        report.num_computed_tokens,
    )
    assert kinds == (0, 24, 4)
    assert report.num_recomputed_tokens == (0 if policy == "shift" else 3)


def test_a_relayed_token_is_charged_what_its_policy_computes_of_it() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=64, max_num_batched_tokens=12))
    engine.serve(make_request("writer", range(500, 600), session="s"))
    engine.add(make_request("reader", [1, *range(500, 600), 2], session="s", policy="shift"))

    assert parts(engine.step()) == [("reader", 0, 102)]  # 100 of them cost nothing
    engine.run()


def test_sources_are_held_only_until_the_copy_has_run() -> None:
    engine = FakeEngine(EngineSizes(max_num_batched_tokens=8))
    engine.serve(make_request("writer", SAID, session="s"))
    request = engine.add(make_request("r", [*range(20), *SAID, 1], session="s"))

    first = engine.step()

    assert [copy.num_tokens for copy in first.copies] == [24]
    assert request.source_blocks == []
    assert request.is_prefilling
    assert engine.step().copies == ()
    engine.run()
    assert_answered(engine, request)


def test_a_session_may_be_deleted_while_a_request_of_it_is_prefilled() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=32, max_num_batched_tokens=8))
    engine.serve(make_request("writer", SAID, session="s"))
    request = engine.add(make_request("r", [*range(20), *SAID, 1], session="s"))
    engine.step()

    assert request.session_key is not None
    assert engine.recordings.delete_session(request.session_key)
    engine.add(make_request("other", range(100, 160)))  # wants the blocks that became idle
    engine.run()

    assert_answered(engine, request)


def test_after_a_relayed_request_the_same_prompt_without_a_session_reads_exact_kv_only() -> None:
    engine = FakeEngine()
    engine.serve(make_request("writer", SAID, session="s"))
    prompt = [1, 2, 3, 4, *SAID, 5, 6, 7, 8]
    engine.serve(make_request("relayed", prompt, session="s"))

    again = engine.serve(make_request("again", prompt, session="s"))
    plain = engine.serve(make_request("plain", prompt))
    full = engine.serve(make_request("full", prompt, session="s", policy="full"))

    assert again.usage().num_cached_tokens == 28
    assert plain.usage().num_cached_tokens == 4
    assert full.usage().num_cached_tokens == 28  # now that `plain` computed them exactly
    assert full.approximate_from is None
    assert_answered(engine, again, plain, full)


def test_influence_is_counted_only_while_a_session_decodes() -> None:
    engine = FakeEngine()
    engine.add(make_request("session", range(6), session="s"))
    engine.add(make_request("none", range(100, 106)))

    prefill, decode = engine.step(), engine.step()

    assert [part.counts_influence for part in prefill.requests] == [False, False]
    assert [part.counts_influence for part in decode.requests] == [True, False]
    engine.run()


@pytest.mark.parametrize("session", [None, "s"])
def test_a_request_that_needs_the_whole_pool_is_served_in_a_crowd(session: str | None) -> None:
    engine = FakeEngine(EngineSizes(num_blocks=8))
    for count in range(4):
        engine.add(make_request(f"small {count}", range(count, count + 9), 6, session))
    big = engine.add(make_request("big", range(300, 320), 50, session))
    engine.add(make_request("last", range(9), 6, session))

    engine.run()

    assert len(big.token_ids) == 32
    assert_answered(engine, *engine.finished.values())


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_smallest_budgets_still_serve_everybody(budget: int) -> None:
    sizes = EngineSizes(num_blocks=32, max_num_batched_tokens=budget, max_num_requests=4)
    engine = FakeEngine(sizes)
    engine.serve(make_request("writer", SAID, session="s"))
    for count, policy in enumerate(("shift", "epic", "cacheblend", "relay", "full")):
        engine.add(make_request(f"r{count}", [count, *SAID, count], 3, "s", policy))
    engine.run()

    assert_answered(engine, *engine.finished.values())
