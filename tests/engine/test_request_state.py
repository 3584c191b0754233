from __future__ import annotations

from dataclasses import replace

import pytest
from engine_factory import make_request

from relaykv.engine.batch import UNKNOWN_TOKEN
from relaykv.engine.prefill_plan import plan_prefill
from relaykv.engine.recording import SessionKey
from relaykv.engine.relay_report import PromptRun, RunKind, RunSource, SegmentReport
from relaykv.engine.request import GrammarKind, GrammarSpec, SamplingParams, Usage
from relaykv.engine.request_state import Request, SegmentSource
from relaykv.engine.segment import Segment


def relayed_request(explain: bool = False) -> Request:
    """100 prompt tokens: 16 of a prefix hit, two segments of 20 and 30, the rest computed."""
    request = make_request("r", range(100), session="s", policy="relay", explain=explain)
    segments = [Segment(20, 40, 1, 5), Segment(50, 80, 1, 50)]
    request.plan = request.first_plan = plan_prefill(100, 16, segments, 8, lambda _: request.policy)
    request.sources = (
        SegmentSource(20, 40, "w", 5, "relay"),
        SegmentSource(50, 80, "w", 50, "relay"),
    )
    return request


def test_tokens_are_told_apart_by_the_length_of_the_prompt() -> None:
    request = make_request("r", [1, 2, 3])
    request.token_ids += [4, 5]

    assert request.num_prompt_tokens == 3
    assert request.num_output_tokens == 2
    assert list(request.output_token_ids) == [4, 5]


def test_a_session_belongs_to_its_tenant() -> None:
    assert make_request("r", [1]).session_key is None
    assert make_request("r", [1], session="s", tenant="b").session_key == SessionKey("b", "s")


@pytest.mark.parametrize(
    ("num_computed", "num_answered", "is_prefilling"),
    [
        pytest.param(0, 0, True, id="a new request"),
        pytest.param(9, 0, True, id="a prompt but for its last token"),
        pytest.param(10, 1, False, id="decoding"),
        pytest.param(0, 3, True, id="preempted"),
        pytest.param(11, 3, True, id="preempted and all but two tokens computed again"),
        pytest.param(12, 3, False, id="preempted and all but one token computed again"),
    ],
)
def test_a_request_prefills_until_one_token_is_missing(
    num_computed: int, num_answered: int, is_prefilling: bool
) -> None:
    request = make_request("r", range(10))
    request.token_ids += range(num_answered)
    request.num_computed_tokens = num_computed

    assert request.is_prefilling is is_prefilling


def test_a_token_that_is_still_being_sampled_counts_for_steps_but_not_for_the_caller() -> None:
    request = make_request("r", range(10), session="s")
    request.token_ids += [70, 71]
    request.num_computed_tokens, request.num_collected_tokens = 12, 11
    request.num_awaited_tokens = 1

    assert request.num_tokens == 13
    assert request.num_output_tokens == request.usage().num_output_tokens == 2
    assert request.is_in_flight
    assert not request.is_prefilling
    part = request.part(13)
    assert (part.start, part.stop, part.token_ids) == (12, 13, (UNKNOWN_TOKEN,))
    assert part.counts_influence
    assert part.sampling is not None
    assert part.sampling.output_token_ids == (70, 71, UNKNOWN_TOKEN)


@pytest.mark.parametrize(
    ("num_answered", "num_awaited", "has_all"),
    [(2, 1, False), (3, 0, False), (3, 1, True), (4, 0, True), (2, 2, True)],
)
def test_the_last_token_is_foreseen_while_it_is_being_sampled(
    num_answered: int, num_awaited: int, has_all: bool
) -> None:
    for max_tokens, max_model_len in ((4, 1000), (1000, 14)):
        request = make_request("r", range(10), max_tokens=max_tokens)
        request.token_ids += range(num_answered)
        request.num_awaited_tokens = num_awaited

        assert request.has_all_tokens(max_model_len) is has_all


@pytest.mark.parametrize(
    ("params", "needs_tokens"),
    [
        (SamplingParams(5), False),
        (SamplingParams(5, temperature=1.0, top_k=4, top_p=0.5, min_p=0.1, stop=("x",)), False),
        (SamplingParams(5, logit_bias=((3, 1.0),), num_logprobs=2, stop_token_ids=(3,)), False),
        (SamplingParams(5, repetition_penalty=1.1), True),
        (SamplingParams(5, presence_penalty=0.1), True),
        (SamplingParams(5, frequency_penalty=-0.1), True),
        (SamplingParams(5, grammar=GrammarSpec(GrammarKind.LARK, 'start: "a"')), True),
    ],
)
def test_only_penalties_and_grammars_look_at_the_tokens_before(
    params: SamplingParams, needs_tokens: bool
) -> None:
    request = make_request("r", [1])
    request.spec = replace(request.spec, sampling=params)

    assert request.samples_by_known_tokens is needs_tokens


def test_a_request_that_never_ran_used_nothing() -> None:
    request = make_request("r", range(10), session="s")

    assert request.usage() == Usage(10, 0, 0)
    report = request.report(8)
    assert report.num_computed_tokens == 10
    assert report.recomputed_share == 0
    assert report.reason is None


def test_cached_tokens_are_the_prefix_and_what_was_relayed_and_not_recomputed() -> None:
    request = relayed_request()
    assert request.usage().num_cached_tokens == 66

    request.recomputed = {20: (0, 1, 2, 3), 50: (24, 25, 26, 27, 28, 29)}

    assert request.usage().num_cached_tokens == 56


def test_the_report_counts_every_token_of_the_prompt_once() -> None:
    request = relayed_request()
    request.recomputed = {20: (0, 1, 2, 3), 50: (24, 25, 26, 27, 28, 29)}
    request.num_relay_layer_tokens = 100

    report = request.report(num_layers=8)

    assert report.num_prefix_tokens == 16
    assert report.num_relayed_tokens == 40
    assert report.num_recomputed_tokens == 10
    assert report.num_computed_tokens == 34
    assert report.recomputed_share == 100 / (50 * 8)
    assert (report.session, report.policy) == ("s", "relay")
    assert (report.segments, report.runs) == ((), ())


def test_segments_are_listed_only_when_asked_for() -> None:
    request = relayed_request(explain=True)
    # The second segment was relayed in two chunks, each counted under its own start.
    request.recomputed = {20: (0, 1, 2, 3), 50: (0, 1, 2, 3, 4, 5), 64: (15,)}

    assert request.report(8).segments == (
        SegmentReport(20, 40, "w", 5, 4, "relay"),
        SegmentReport(50, 80, "w", 50, 7, "relay"),
    )


def test_runs_are_listed_only_when_asked_for() -> None:
    request = relayed_request(explain=True)
    request.recomputed = {20: (0, 1, 2, 3), 50: (12, 13), 64: (0, 15)}

    assert request.report(8).runs == (
        PromptRun(RunKind.PREFIX, 0, 16),
        PromptRun(RunKind.COMPUTED, 16, 20),
        PromptRun(RunKind.RECOMPUTED, 20, 24, RunSource("w", 5)),
        PromptRun(RunKind.RELAYED, 24, 40, RunSource("w", 9)),
        PromptRun(RunKind.COMPUTED, 40, 50),
        PromptRun(RunKind.RELAYED, 50, 62, RunSource("w", 50)),
        PromptRun(RunKind.RECOMPUTED, 62, 65, RunSource("w", 62)),
        PromptRun(RunKind.RELAYED, 65, 79, RunSource("w", 65)),
        PromptRun(RunKind.RECOMPUTED, 79, 80, RunSource("w", 79)),
        PromptRun(RunKind.COMPUTED, 80, 100),
    )


def test_the_prompt_of_a_request_that_never_ran_is_one_run() -> None:
    request = make_request("r", range(10), session="s", explain=True)

    assert request.report(8).runs == (PromptRun(RunKind.COMPUTED, 0, 10),)


def test_a_reason_is_given_only_to_requests_of_a_session() -> None:
    request = make_request("r", [1], session="s")
    request.refusal = "nothing there"
    assert request.report(8).reason == "nothing there"

    request.spec = replace(request.spec, relay=replace(request.spec.relay, session=None))

    assert request.report(8).reason is None
