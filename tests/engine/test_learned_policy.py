"""Hand-offs of one kind, again and again, through a whole engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from sync_recorder import SyncRecorder
from tiny_core import Result, ids, request, run, tiny_core, tiny_parts
from torch import Tensor

from relaykv.engine import handoff_slots
from relaykv.engine.assembly import build_core
from relaykv.engine.batch import Observation, PendingErrors
from relaykv.engine.core import EngineCore
from relaykv.engine.offset_memory import OFFSET_SCALE
from relaykv.engine.recording import Recording
from relaykv.kernels.rope import cos_sin, rotate_keys
from relaykv.kernels.staging import Staging

NUM_TEXT_TOKENS = 60
NUM_FIRST = 16  # computed again at the start of a segment


@pytest.fixture
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's hand-offs have little in common; what follows is about the way there."""
    monkeypatch.setattr(handoff_slots, "MAX_KEY_ERROR", 9.0)
    monkeypatch.setattr(handoff_slots, "MAX_VALUE_ERROR", 9.0)


def hand_off(
    core: EngineCore, number: int, policy: str, glue: Sequence[int] = (), max_tokens: int = 3
) -> Result:
    """A writer's text in the prompt of a reader whose task differs from time to time."""
    session = f"session {number}"
    written = run(core, request(f"w{number}", ids(1, 40), NUM_TEXT_TOKENS, session))[0]
    task, before = ids(100 + number, 5 + number), glue or ids(3, 16)
    prompt = [*ids(2, 40), *task, *before, *written.token_ids, *ids(4, 7)]
    return run(core, request(f"r{number}", prompt, max_tokens, session, policy))[0]


def recorded(core: EngineCore, request_id: str) -> Recording:
    found = (r for _, recordings, _ in core.recordings.sessions("") for r in recordings)
    return next(recording for recording in found if recording.request_id == request_id)


def kept(core: EngineCore, request_id: str, start: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a recording, [L, tokens, Hkv, D]."""
    blocks = [block.id for block in recorded(core, request_id).blocks]
    slots = core.runner.cache.slots(blocks, start, start + num_tokens)
    return core.runner.cache.k[:, slots], core.runner.cache.v[:, slots]


def turned(k: Tensor, position: int) -> Tensor:
    inv_freq = torch.from_numpy(tiny_core().runner._inv_freq)
    cos, sin = cos_sin(inv_freq, torch.tensor([position]))
    return rotate_keys(k, cos[0], sin[0])


def policies(result: Result) -> list[str]:
    return [segment.policy for segment in result.relay.segments]


@pytest.mark.usefixtures("open_gate")
def test_the_first_four_are_computed_and_the_fifth_is_corrected_by_their_mean() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    for number in range(4):
        result = hand_off(core, number, "learned")
        assert policies(result) == ["full"]
        assert result.relay.num_relayed_tokens == 0
        assert "observed" in str(result.relay.reason)
    lacks = []
    for number in range(4):
        segment_start = 40 + 5 + number + 16
        new_k, new_v = kept(core, f"r{number}", segment_start, NUM_TEXT_TOKENS - 1)
        old_k, old_v = kept(core, f"w{number}", 40, NUM_TEXT_TOKENS - 1)
        lack_k = turned(new_k, -segment_start) - turned(old_k, -40)
        lacks.append(torch.stack((lack_k.mean(1), (new_v - old_v).mean(1))))
    added = OFFSET_SCALE * torch.stack(lacks).mean(0)  # [2, L, Hkv, D]

    result = hand_off(core, 4, "learned")

    assert policies(result) == ["learned"]
    segment = result.relay.segments[0]
    assert "the mean of 4 observations of hand-offs of this kind" in segment.why
    assert segment.num_recomputed_tokens == NUM_FIRST
    rest = segment.source_start + NUM_FIRST
    num_rest = segment.stop - segment.start - NUM_FIRST
    old_k, old_v = kept(core, "w4", rest, num_rest)
    new_k, new_v = kept(core, "r4", segment.start + NUM_FIRST, num_rest)
    shift = segment.start - segment.source_start
    expected_k = turned(old_k, shift) + turned(added[0][:, None], segment.start)
    torch.testing.assert_close(new_k, expected_k, rtol=0, atol=2e-5)
    torch.testing.assert_close(new_v, old_v + added[1][:, None], rtol=0, atol=2e-5)


def test_a_mean_that_leaves_too_much_is_refused_and_the_response_says_so() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    results = [hand_off(core, number, "learned") for number in range(6)]
    assert [policies(result) for result in results] == [["full"]] * 6
    assert "in those it had not seen" in results[-1].relay.segments[0].why


@pytest.mark.usefixtures("open_gate")
def test_auto_relays_from_the_first_on_and_learns_from_every_fourth() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    served = [policies(hand_off(core, number, "auto"))[0] for number in range(18)]
    assert served == ["epic", "epic", "epic", "full"] * 4 + ["learned", "learned"]


@pytest.mark.usefixtures("open_gate")
def test_observe_answers_exactly_and_teaches_the_policies_that_learn() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    for number in range(4):
        result = hand_off(core, number, "observe")
        assert policies(result) == ["full"]
        assert result.relay.segments[0].why == "the policy computes everything"
        assert recorded(core, f"r{number}").taint == 0
    assert policies(hand_off(core, 4, "auto")) == ["learned"]


@pytest.mark.usefixtures("open_gate")
def test_other_words_before_the_segment_are_another_kind() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    for number in range(4):
        hand_off(core, number, "observe")
    assert policies(hand_off(core, 4, "auto")) == ["learned"]
    assert policies(hand_off(core, 5, "auto", glue=ids(77, 16))) == ["epic"]


@pytest.mark.usefixtures("open_gate")
def test_an_engine_without_memory_for_it_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core(max_num_batched_tokens=256)
    monkeypatch.setattr(core._scheduler._admission._chooser, "_handoffs", None)
    for number in range(6):
        result = hand_off(core, number, "auto")
        assert policies(result) == ["epic"]
        assert result.relay.segments[0].why == "this engine learns nothing"


def test_an_engine_without_memory_for_it_keeps_no_block_of_what_it_might_have_learned() -> None:
    parts = tiny_parts(max_num_batched_tokens=256)
    core = build_core(replace(parts, relay=replace(parts.relay, num_offsets=0)))
    assert policies(hand_off(core, 0, "learned")) == ["full"]
    assert core.pool.counts().used == 0


def test_what_was_relayed_itself_never_teaches() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    observed: list[Observation] = []
    observe = core.runner.observe

    def watch(observations: Sequence[Observation]) -> PendingErrors:
        observed.extend(observations)
        return observe(observations)

    core.runner.observe = watch  # type: ignore[method-assign]
    for number in range(
        3
    ):  # each session: a text, one that quotes it relayed, one that quotes that
        session = f"session {number}"
        first = run(core, request(f"a{number}", ids(1, 40), 60, session))[0]
        quoting = [*ids(2, 40 + number), *first.token_ids, *ids(4, 7)]
        second = run(core, request(f"b{number}", quoting, 60, session, "shift"))[0]
        assert second.relay.num_relayed_tokens > 0
        prompt = [*ids(5, 40 + number), *second.token_ids]
        run(core, request(f"c{number}", prompt, 2, session, "learned"))
    assert observed == []


def test_observing_waits_until_the_first_token_is_out_and_does_not_hold_up_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = SyncRecorder()
    monkeypatch.setattr(Staging, "upload", recorder.expecting(Staging.upload))
    core = tiny_core(max_num_batched_tokens=256)
    events: list[str] = []
    observe = core.runner.observe

    def watch(observations: Sequence[Observation]) -> PendingErrors:
        uploads, calls = recorder.num_expected, len(recorder.calls)
        with recorder:
            errors = observe(observations)
        assert recorder.num_expected - uploads == 1
        assert recorder.calls[calls:] == []
        events.append("observed")
        return errors

    core.runner.observe = watch  # type: ignore[method-assign]
    written = run(core, request("w", ids(1, 40), 60, "s"))[0]
    core.add(request("r", [*ids(2, 40), *written.token_ids, *ids(4, 7)], 3, "s", "learned"))
    while core.has_work:
        events += ["token" for output in core.step() for _ in output.token_ids]
    assert events == ["token", "observed", "token", "token"]


def test_a_failed_observation_costs_what_was_to_be_learned_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = tiny_core(max_num_batched_tokens=256)
    observe = core.runner.observe

    def fail(observations: Sequence[Observation]) -> PendingErrors:
        raise RuntimeError(f"no memory for {len(observations)}")

    core.runner.observe = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        assert len(hand_off(core, 0, "learned").token_ids) == 3
    assert "observations of hand-offs failed and are dropped" in caplog.text
    core.runner.observe = observe  # type: ignore[method-assign]
    why = hand_off(core, 1, "learned").relay.segments[0].why
    assert "observed 0 times" in why or "due to be observed" in why
    assert core.pool.counts().used == 0


@pytest.mark.parametrize(("num_answers", "policy"), [(2, "epic"), (3, "full")])
def test_auto_computes_answers_to_one_question_that_stand_side_by_side(
    num_answers: int, policy: str
) -> None:
    core = tiny_core(max_num_batched_tokens=256)
    prompt = ids(2, 40)
    for number in range(num_answers):
        asked = request(f"w{number}", ids(10 + number, 40), 50, "s")
        asked = replace(asked, relay=replace(asked.relay, question="why"))
        prompt += [*run(core, asked)[0].token_ids, *ids(30 + number, 5)]
    other = run(core, request("other", prompt, 2, "s", "shift", store=False))[0]
    assert policies(other) == ["shift"] * num_answers
    result = run(core, request("judge", prompt, 2, "s", "auto"))[0]
    assert policies(result) == [policy] * num_answers
    if policy == "full":
        assert "answers to one question are compared here" in str(result.relay.reason)


def test_answers_to_different_questions_are_relayed_however_many() -> None:
    core = tiny_core(max_num_batched_tokens=256)
    prompt = ids(2, 40)
    for number in range(4):
        asked = request(f"w{number}", ids(10 + number, 40), 50, "s")
        asked = replace(asked, relay=replace(asked.relay, question=f"why {number}"))
        prompt += [*run(core, asked)[0].token_ids, *ids(30 + number, 5)]
    assert policies(run(core, request("r", prompt, 2, "s", "auto"))[0]) == ["epic"] * 4
