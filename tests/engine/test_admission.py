from __future__ import annotations

import pytest
from engine_factory import EngineSizes, FakeEngine, make_request

from relaykv.engine.prefill_plan import SpanKind
from relaykv.engine.request_state import Request

SAID = list(range(500, 524))  # fills six blocks


def record(
    engine: FakeEngine, name: str, token_ids: list[int], session: str = "s", policy: str = "shift"
) -> Request:
    """Serves a request whose recording holds exactly these tokens."""
    return engine.serve(make_request(name, token_ids, max_tokens=1, session=session, policy=policy))


def spans(request: Request) -> list[tuple[str, int, int]]:
    assert request.first_plan is not None
    return [(span.kind.value, span.start, span.stop) for span in request.first_plan.spans]


def test_a_request_gets_blocks_for_all_its_tokens_and_a_plan() -> None:
    engine = FakeEngine()
    request = make_request("r", range(9))

    assert engine.admission.admit(request) == []

    assert len(request.blocks) == 3
    assert request.num_computed_tokens == 0
    assert spans(request) == [("compute", 0, 9)]
    assert request.plan is request.first_plan


def test_what_a_session_recorded_is_relayed_with_one_copy_per_segment() -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)
    request = make_request("r", [1, 2, 3, *SAID[:20], 4, *SAID[4:16], 5], session="s")

    copies = engine.admission.admit(request)

    assert spans(request) == [
        ("compute", 0, 3),
        ("relay", 3, 23),
        ("compute", 23, 24),
        ("relay", 24, 36),
        ("compute", 36, 37),
    ]
    assert copies is not None
    assert [(copy.source_start, copy.start, copy.num_tokens) for copy in copies] == [
        (0, 3, 20),
        (4, 24, 12),
    ]
    assert all(copy.block_ids == tuple(b.id for b in request.blocks) for copy in copies)
    assert request.approximate_from == 3
    assert request.taint == 1
    assert [source.request_id for source in request.sources] == ["writer", "writer"]
    assert request.refusal is None


def test_the_prefix_comes_first_and_segments_cover_what_it_leaves() -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)
    request = make_request("r", [*SAID[:21], 7, *SAID[4:20], 8], session="s")

    engine.admission.admit(request)

    # Of SAID[:21] the prefix covers 20 tokens; one alone is too short to be relayed.
    assert spans(request) == [
        ("prefix", 0, 20),
        ("compute", 20, 22),
        ("relay", 22, 38),
        ("compute", 38, 39),
    ]
    assert request.num_computed_tokens == 20


@pytest.mark.parametrize(
    ("session", "policy", "tenant"), [(None, "shift", ""), ("s", "full", ""), ("s", "shift", "b")]
)
def test_nothing_is_relayed_without_the_session_its_tenant_and_a_relaying_policy(
    session: str | None, policy: str, tenant: str
) -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)
    request = make_request("r", [1, *SAID], session=session, policy=policy, tenant=tenant)

    assert engine.admission.admit(request) == []

    assert spans(request) == [("compute", 0, 25)]
    assert request.approximate_from is None
    assert request.taint == 0


def test_the_reason_for_relaying_nothing_is_told() -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)

    def refusal(session: str | None, policy: str = "shift") -> str | None:
        request = make_request(f"{session} {policy}", range(20), session=session, policy=policy)
        engine.serve(request)
        return request.refusal

    assert refusal(None) is None
    assert refusal("s", "full") == "policy 'full' relays nothing"
    assert refusal("new") == "the session holds no recordings yet"
    told = refusal("s", "epic")
    assert told is not None
    assert told.startswith("no run of at least 8 tokens")


def test_taint_rises_by_one_with_every_hand_off() -> None:
    engine = FakeEngine()
    taints = []
    quoted: list[int] = list(range(700, 710))
    for count in range(4):
        request = make_request(f"r{count}", [count, *quoted], max_tokens=12, session="s")
        engine.serve(request)
        taints.append(request.taint)
        quoted = list(request.output_token_ids)

    assert taints == [0, 1, 2, 3]
    assert [recording.taint for recording in engine.all_recordings()] == taints


def test_an_approximate_prefix_makes_everything_behind_it_approximate() -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)
    prompt = [1, 2, 3, 4, *SAID, 5, 6, 7, 8]
    record(engine, "reader", prompt)
    request = make_request("again", [*prompt, 9], session="s")

    assert engine.admission.admit(request) == []

    assert request.num_computed_tokens == 32
    assert request.approximate_from == 4
    assert request.taint == 1


def test_full_policy_and_no_session_take_only_the_exact_part_of_a_prefix() -> None:
    engine = FakeEngine()
    record(engine, "writer", SAID)
    prompt = [1, 2, 3, 4, *SAID, 5, 6, 7, 8]
    record(engine, "reader", prompt)

    for session, policy in ((None, "full"), ("s", "full"), ("s", "epic"), ("t", "shift")):
        request = make_request(f"{session} {policy}", [*prompt, 9], session=session, policy=policy)
        engine.admission.admit(request)
        assert request.num_computed_tokens == 4
        engine.pool.release(request.source_blocks)
        engine.pool.release(request.blocks)


def test_the_sources_of_a_copy_are_kept_though_making_room_evicts_their_recording() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=16))
    record(engine, "writer", SAID)
    record(engine, "other", list(range(100, 120)))
    # Six and five blocks are recorded; ten are wanted, so both recordings have to go.
    request = make_request("r", [1, 2, *SAID, *range(200, 213)], session="s")

    engine.add(request)
    batch = engine.step()

    assert len(engine.recordings) == 0
    assert [copy.num_tokens for copy in batch.copies] == [24]
    assert engine.runner.num_copied_tokens == 24
    engine.run()


def test_sources_that_are_in_the_way_of_their_own_reader_give_way() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=12))
    record(engine, "writer", SAID)
    request = make_request("r", [1, *SAID, *range(200, 207)], max_tokens=1, session="s")

    engine.serve(request)  # eight blocks: with the six of the source more than there are

    assert spans(request) == [("compute", 0, 32)]
    assert request.refusal == "the KV cache has no room for the recordings beside this request"
    assert request.taint == 0


def test_a_request_without_room_is_left_as_it_was() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=12))
    record(engine, "writer", SAID)
    engine.add(make_request("long", range(20), max_tokens=20, session="s"))
    engine.step()
    before = engine.pool.counts(), len(engine.recordings)
    request = make_request("r", [*SAID, *range(8)], session="s")

    assert engine.admission.admit(request) is None

    assert (engine.pool.counts(), len(engine.recordings)) == before
    assert request.blocks == request.source_blocks == []
    assert request.plan is request.first_plan is None
    engine.check()
    engine.run()


def test_a_prompt_that_fills_the_pool_is_admitted_whatever_is_recorded() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=8))
    record(engine, "writer", SAID)

    for count, start in enumerate((500, 400, 501)):
        prompt = list(range(start, start + 31))
        request = make_request(f"r{count}", prompt, max_tokens=9, session="s")
        engine.serve(request)
        assert request.num_output_tokens == 1
        assert request.first_plan is not None
        assert request.first_plan.count(SpanKind.COMPUTE) >= 1


def test_room_is_not_made_when_running_requests_hold_too_much() -> None:
    engine = FakeEngine(EngineSizes(num_blocks=12))
    record(engine, "writer", SAID[:8])
    engine.add(make_request("long", range(20), max_tokens=4))
    engine.step()

    assert not engine.admission.make_room(8)
    assert len(engine.recordings) == 1
    assert engine.admission.make_room(7)
    assert len(engine.recordings) == 0
    engine.run()
