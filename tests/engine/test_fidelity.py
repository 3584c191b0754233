"""Fidelity from hand-offs to scores, on random models; its order, on the default model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_model import planted_handoffs, prompt
from readable_model import readable_parts

from relaykv.engine.assembly import EngineParts, prepare
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.fidelity import (
    Fidelity,
    FidelityLengths,
    HandoffResult,
    choose_policies,
)
from relaykv.engine.fidelity_scores import Score
from relaykv.engine.handoff import HandoffError, read_handoffs
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.producers import Lengths, Producers
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.model_command import prompt_of

_ALL = Policy(
    "all", True, Bands(0, 0, 2), Selection(deviation=Deviation.COSINE, deviation_share=1.0)
)
_LENGTHS = FidelityLengths(producer=64, compared=8, greedy=12)
_HANDOFFS = Path(__file__).parents[2] / "benchmarks" / "handoffs.jsonl"


def random_parts() -> EngineParts:
    parts = readable_parts()
    return replace(parts, policies={**parts.policies, "all": _ALL})


def measure(policies: Sequence[str], count: int = 3) -> list[HandoffResult]:
    fidelity = Fidelity(random_parts(), prompt, planted_handoffs(count), policies, _LENGTHS)
    return list(fidelity.measure(lambda _: None))


def test_divergence_is_that_of_the_formula() -> None:
    # 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.143841
    reference = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log()
    other = torch.tensor([[0.25, 0.75], [0.2, 0.8]]).log()
    torch.testing.assert_close(kl_divergence(reference, other), torch.tensor([0.143841, 0.0]))


def test_every_handoff_is_scored_under_every_policy() -> None:
    results = measure(["shift", "epic", "relay", "all"])

    assert [result.handoff for result in results] == [f"handoff {i}" for i in range(3)]
    for result in results:
        assert [score.policy for score in result.scores] == ["shift", "epic", "relay", "all"]
        assert {score.case for score in result.scores} == {result.handoff}
        assert result.right is None
        shift, epic, relay, everything = result.scores
        assert shift.computed_share == 0.0
        assert shift.kl > 1e-4
        # 16 of the 63 or twice 63 tokens that have KV, at every layer.
        assert epic.computed_share == pytest.approx(16 / 63)
        assert 0.0 < relay.computed_share < 1.0
        assert everything.computed_share == 1.0
        assert everything.kl < 1e-6
        assert (everything.next_token, everything.greedy) == (1.0, 1.0)
        assert everything.same_answer
    assert [result.scores[0].num_matched_tokens for result in results] == [63, 63, 126]


def test_two_runs_give_the_same_scores() -> None:
    assert measure(["shift", "relay"], 2) == measure(["shift", "relay"], 2)


def test_progress_counts_handoffs_and_nothing_is_left_recorded() -> None:
    fidelity = Fidelity(random_parts(), prompt, planted_handoffs(5), ["shift"], _LENGTHS)
    steps: list[float] = []

    assert len(list(fidelity.measure(steps.append))) == 5

    assert sum(steps) == pytest.approx(5)
    assert fidelity.core.stats().num_recorded_blocks == 0


def test_an_answer_is_asked_for_only_where_a_producer_has_handed_it_on() -> None:
    one, other = planted_handoffs(2)
    producers = Producers(random_parts(), prompt, [one], Lengths(64, 12))
    (text,) = producers.write(producers.groups[0], lambda _: None).values()
    known = text.split()[0]
    handoffs = [replace(one, answer=known), replace(other, answer="never written")]

    results = list(
        Fidelity(random_parts(), prompt, handoffs, ["shift"], _LENGTHS).measure(lambda _: None)
    )

    assert results[0].right is not None
    assert results[0].scores[0].right is not None
    assert (results[1].right, results[1].scores[0].right) == (None, None)


def test_handoffs_that_relay_nothing_give_no_result() -> None:
    short = replace(_LENGTHS, producer=20)
    fidelity = Fidelity(random_parts(), prompt, planted_handoffs(2), ["shift"], short)
    assert list(fidelity.measure(lambda _: None)) == []


def test_a_handoff_too_long_for_the_model_is_refused_by_its_id() -> None:
    with pytest.raises(HandoffError, match="hand-off 'handoff 0' may need"):
        Fidelity(
            random_parts(),
            prompt,
            planted_handoffs(1),
            ["shift"],
            replace(_LENGTHS, producer=900),
        )


def test_all_policies_that_relay_are_compared_unless_some_are_named() -> None:
    parts = random_parts()
    every = choose_policies(parts, None, [])[1]
    assert set(every) == parts.policies.keys() - {"full", "observe"}
    assert every[:4] == ["shift", "epic", "cacheblend", "relay"]
    assert choose_policies(parts, ["full", "epic", "epic"], [])[1] == ["epic"]


def test_further_bands_become_policies_of_their_own() -> None:
    chosen, names = choose_policies(random_parts(), ["shift"], [Bands(1, 1, 2), Bands(0, 1, 2)])

    assert names == ["shift", "relay 1,1,2", "relay 0,1,2"]
    assert chosen.policies["relay 1,1,2"].bands == Bands(1, 1, 2)
    assert chosen.hidden_layer == 1
    results = list(
        Fidelity(chosen, prompt, planted_handoffs(1), names, _LENGTHS).measure(lambda _: None)
    )
    assert [score.policy for score in results[0].scores] == names


@pytest.mark.parametrize(
    ("names", "bands", "reason"),
    [
        (["full"], [], "no policy to compare"),
        (["shift", "magic"], [], "unknown policy 'magic'; known: full, shift"),
        (["shift"], [Bands(1, 2, 3)], "layer 3 is past"),
        (["shift"], [Bands(1, 2, 2), Bands(2, 2, 2)], "inject at the layers 1 and 2"),
    ],
)
def test_policies_that_cannot_be_compared_are_refused(
    names: list[str], bands: list[Bands], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_policies(random_parts(), names, bands)


@pytest.fixture(scope="module")
def scores(default_model_dir: Path) -> list[Score]:
    """Of twelve hand-offs on the default model; those with two producers are among them."""
    assert default_model_dir.is_dir()
    parts = prepare(EngineOptions(deterministic=True))
    render = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    handoffs = read_handoffs(_HANDOFFS)[-12:]
    lengths = FidelityLengths(producer=220, compared=32, greedy=64)
    fidelity = Fidelity(parts, render, handoffs, ["shift", "epic", "cacheblend", "relay"], lengths)
    return [score for result in fidelity.measure(lambda _: None) for score in result.scores]


def _mean_kl(scores: Sequence[Score], policy: str) -> float:
    return statistics.fmean(score.kl for score in scores if score.policy == policy)


@pytest.mark.model
@pytest.mark.slow
def test_every_repairing_policy_is_nearer_to_full_prefill_than_shift(scores: list[Score]) -> None:
    shift = [score for score in scores if score.policy == "shift"]
    assert len(shift) == 12
    assert all(score.num_matched_tokens >= 190 for score in shift)
    for policy in ("epic", "cacheblend", "relay"):
        assert _mean_kl(scores, policy) < _mean_kl(scores, "shift")
    assert _mean_kl(scores, "relay") <= 0.5 * _mean_kl(scores, "shift")
