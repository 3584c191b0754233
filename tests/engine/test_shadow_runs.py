"""Relayed requests that are computed in full when the engine is idle, on a tiny model."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from tiny_core import Result, ids, request, run, take, tiny_parts
from torch import Tensor

from relaykv.engine.assembly import build_core
from relaykv.engine.config import DeviceConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.request import GenerateRequest


def shadowed_core(
    rate: float = 1.0, bound: float = 100.0, policy: str = "shift", overlap: bool = False
) -> EngineCore:
    parts = tiny_parts()
    relay = replace(
        parts.relay, default_policy=policy, shadow_rate=rate, shadow_bound=bound, num_offsets=30
    )
    return build_core(replace(parts, relay=relay, device=DeviceConfig(overlap=overlap)))


def reader(name: str, session: str, written: Result, policy: str | None = None) -> GenerateRequest:
    return request(name, [*ids(2, 60), *written.token_ids, *ids(4, 7)], 12, session, policy)


def serve(core: EngineCore, *requests: GenerateRequest) -> list[Result]:
    """Serves requests until they have ended; shadow runs may be left."""
    results = {r.request_id: Result() for r in requests}
    for item in requests:
        core.add(item)
    while any(not r.outputs or r.last.finish_reason is None for r in results.values()):
        for output in core.step():
            take(results[output.request_id], output)
    return list(results.values())


def log_probs_of(core: EngineCore, spec: GenerateRequest, num_positions: int) -> Tensor:
    """What a request's tokens were chosen by."""
    core.runner.watch(spec.request_id, num_positions)
    serve(core, spec)
    return torch.stack(core.runner.unwatch(spec.request_id)).log_softmax(-1)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_divergence_is_that_of_the_relayed_answer_from_a_full_one(overlap: bool) -> None:
    core = shadowed_core(overlap=overlap)
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    answer = run(core, reader("r", "s", written))[0]
    (summary,) = core.stats().shadows
    assert summary.policy == "shift"
    assert summary.num_runs == 1

    plain = shadowed_core(rate=0.0)
    serve(plain, request("w", ids(1, 40), 60, "s"))
    relayed = log_probs_of(plain, reader("r", "s", written), 12)
    prompt = list(reader("r", "s", written).prompt_token_ids)
    full = []
    for count in range(12):
        spec = request(f"f{count}", [*prompt, *answer.token_ids[:count]], 1)
        full.append(log_probs_of(plain, spec, 1)[0])
    expected = kl_divergence(torch.stack(full), relayed)
    assert summary.mean_kl == pytest.approx(float(expected.mean()), rel=1e-3)
    assert summary.mean_kl > 1e-6
    same = torch.stack(full).argmax(-1) == relayed.argmax(-1)
    assert summary.agreement == pytest.approx(float(same.float().mean()))


def test_nothing_is_computed_again_at_a_rate_of_zero_nor_where_nothing_was_relayed() -> None:
    core = shadowed_core(rate=0.0)
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    run(core, reader("r", "s", written))
    assert core.stats().shadows == ()
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    run(core, reader("r", "s", written, policy="full"), request("x", ids(7, 30), 5))
    assert core.stats().shadows == ()
    assert core.stats().num_waiting_shadows == 0


def test_the_answers_are_those_of_a_server_that_looks_into_nothing() -> None:
    told = []
    for rate in (0.0, 1.0):
        core = shadowed_core(rate)
        written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
        results = run(core, reader("r", "s", written), reader("q", "s", written, "epic"))
        told.append([(r.token_ids, r.last.usage, r.relay.num_relayed_tokens) for r in results])
        assert core.stats().num_running == core.stats().num_waiting == 0
        assert [i.request_id for i in core.sessions("")[0].recordings].count(" shadow") == 0
    assert told[0] == told[1]


def test_a_request_that_comes_meanwhile_takes_the_runs_place_and_the_run_starts_over() -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    serve(core, reader("r", "s", written))
    core.step()
    core.step()
    assert core._shadow.is_running
    assert core.stats().num_running == 0
    (late,) = serve(core, request("late", ids(9, 30), 3))
    assert len(late.outputs) == 3
    assert core.stats().shadows == ()
    while core.has_work:
        assert core.step() == []
    assert core.stats().shadows[0].num_runs == 1
    assert core.stats().num_aborts == 0
    assert core.pool.counts().used == 0


def test_a_run_for_which_no_blocks_lie_idle_is_dropped_and_no_recording_is() -> None:
    parts = tiny_parts(num_blocks=20)
    relay = replace(parts.relay, default_policy="shift", shadow_rate=1.0)
    core = build_core(replace(parts, relay=relay))
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    run(core, reader("r", "s", written))
    assert core.stats().shadows == ()
    assert core.stats().num_dropped_shadows == 1
    assert len(core.sessions("")[0].recordings) == 2


def test_an_aborted_request_is_not_looked_into() -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    core.add(reader("r", "s", written))
    for _ in range(6):
        core.step()
    core.abort("r")
    while core.has_work:
        core.step()
    assert core.stats().shadows == ()
    assert core.stats().num_aborts == 1
    assert core.pool.counts().used == 0


def test_a_run_teaches_the_policies_that_learn() -> None:
    core = shadowed_core(policy="auto")
    for number in range(3):
        session = f"s{number}"
        written = serve(core, request(f"w{number}", ids(1, 40), 60, session))[0]
        prompt = [*ids(2, 40), *ids(50 + number, 5), *ids(3, 16), *written.token_ids, *ids(4, 7)]
        result = run(core, request(f"r{number}", prompt, 4, session))[0]
    assert "observed 2 times" in result.relay.segments[0].why


def test_a_policy_that_drifts_is_given_up_and_the_server_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = shadowed_core(bound=1e-9)
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            prompt = [*ids(20 + number, 40), *written.token_ids, *ids(4, 7)]
            run(core, request(f"r{number}", prompt, 2, "s", store=False))
    assert core.stats().default_policy == "epic"
    assert "sessions get 'epic' from now on" in caplog.text
    fresh = [*ids(99, 40), *written.token_ids, *ids(4, 7)]
    assert run(core, request("after", fresh, 2, "s"))[0].relay.policy == "epic"
    fresh = [*ids(98, 40), *written.token_ids, *ids(4, 7)]
    assert run(core, request("named", fresh, 2, "s", "shift"))[0].relay.policy == "shift"


def test_a_step_that_fails_during_a_run_drops_it() -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    serve(core, reader("r", "s", written))
    launch = core.runner.launch

    def fail(batch: object) -> object:
        core.runner.launch = launch  # type: ignore[method-assign]
        raise RuntimeError(f"no memory for {batch}")

    core.runner.launch = fail  # type: ignore[method-assign,assignment]
    while core.has_work:
        assert core.step() == []
    assert core.stats().num_dropped_shadows == 1
    assert core.pool.counts().used == 0
    assert len(serve(core, request("x", ids(7, 30), 3))[0].outputs) == 3


def test_an_answer_behind_approximate_prefix_hits_alone_is_looked_into_as_well() -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    serve(core, reader("r", "s", written))
    again = serve(core, reader("q", "s", written))[0]
    while core.has_work:
        core.step()
    assert again.relay.num_relayed_tokens == 0
    assert again.relay.num_prefix_tokens > 100
    assert core.stats().shadows[0].num_runs == 2


def test_a_run_leaves_the_influence_of_shared_tokens_alone() -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 48), 60, "s"))[0]
    # Its first blocks are the writer's own, hit exactly, also by the shadow run.
    prompt = [*ids(1, 48), *ids(2, 20), *written.token_ids, *ids(4, 7)]
    serve(core, request("r", prompt, 12, "s"))
    before = core.runner.cache.influence.clone()
    (_, recordings, _), *_ = core.recordings.sessions("")
    recording = next(one for one in recordings if one.request_id == "w")
    shared = core.runner.cache.slots([block.id for block in recording.blocks], 0, 48)
    while core.has_work:
        core.step()
    assert core.stats().shadows[0].num_runs == 1
    assert torch.equal(core.runner.cache.influence[shared], before[shared])


def test_a_run_that_gets_no_blocks_after_all_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    core = shadowed_core()
    written = serve(core, request("w", ids(1, 40), 60, "s"))[0]
    serve(core, reader("r", "s", written))
    monkeypatch.setattr(core._scheduler._admission, "admit", lambda _: None)
    for _ in range(3):
        core.step()
    assert not core.has_work
    assert core.stats().num_dropped_shadows == 1
