"""Drift along chains of agents on a random model, and the sums of its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from planted_model import planted_handoffs, prompt
from readable_model import readable_parts

from relaykv.engine.assembly import EngineParts
from relaykv.engine.chain import Chain, ChainAgent
from relaykv.engine.chain_fidelity import ChainFidelity
from relaykv.engine.chain_report import ChainReport, HopScore, drifts, markdown
from relaykv.engine.drift_plot import draw_drift
from relaykv.engine.fidelity_report import Subject
from relaykv.engine.fidelity_scores import Score
from relaykv.engine.handoff import HandoffError
from relaykv.engine.policy import Bands, Deviation, Policy, Selection

_ALL = Policy(
    "all", True, Bands(0, 0, 2), Selection(deviation=Deviation.COSINE, deviation_share=1.0)
)


def random_parts() -> EngineParts:
    parts = readable_parts()
    return replace(parts, policies={**parts.policies, "all": _ALL})


def chains(count: int, num_agents: int = 4) -> list[Chain]:
    """The consumers of random hand-offs, one behind the other."""
    consumers = [h.consumer for h in planted_handoffs(3 * count * num_agents) if h.producers[1:]]
    found = []
    for number in range(count):
        mine = consumers[number * num_agents : (number + 1) * num_agents]
        agents = [ChainAgent(mine[0].system, f"begin {number}")]
        for consumer in mine[1:]:
            template = consumer.user(["{text}", "and"])
            agents.append(ChainAgent(consumer.system, template))
        found.append(Chain(f"chain {number}", "", tuple(agents)))
    return found


def measure(policies: Sequence[str], count: int = 3, num_tokens: int = 64) -> list[list[HopScore]]:
    fidelity = ChainFidelity(random_parts(), prompt, chains(count), policies, num_tokens, 8)
    steps: list[float] = []
    scores = list(fidelity.measure(steps.append))
    assert sum(steps) == pytest.approx(count)
    assert fidelity.core.stats().num_recorded_blocks == 0
    assert fidelity.core.stats().num_preemptions == 0
    return scores


def test_every_hop_of_every_chain_is_scored_under_every_policy() -> None:
    scores = measure(["shift", "all"])

    assert [each[0].score.case for each in scores] == ["chain 0", "chain 1", "chain 2"]
    for of in scores:
        assert [(s.hop, s.score.policy) for s in of] == [
            (hop, policy) for hop in (1, 2, 3) for policy in ("shift", "all")
        ]
        for each in of:
            # The agent before has written 64 tokens, the last of which has no KV.
            assert each.score.num_matched_tokens == 63
            if each.score.policy == "all":
                assert each.score.kl < 1e-6
                assert each.score.computed_share == 1.0
            else:
                assert each.score.kl > 1e-4
                assert each.score.computed_share == 0.0


def test_from_the_second_hop_on_what_is_relayed_was_itself_relayed() -> None:
    """The chain's last hop alone, its text computed in full, drifts in another way."""
    (long,) = measure(["shift"], count=1)
    parts, (chain,) = random_parts(), chains(1)
    texts = [""]
    for agent in chain.agents[:2]:
        alone = ChainFidelity(parts, prompt, [chain], ["shift"], 64, 8)
        reading = alone.reader.read_full({"a": prompt(agent.system, agent.user(texts[-1]))}, 64)
        texts.append(reading["a"].text)
    first = ChainAgent(chain.agents[1].system, chain.agents[1].user(texts[1]))
    short = replace(chain, agents=(first, chain.agents[2]))
    (scores,) = ChainFidelity(parts, prompt, [short], ["shift"], 64, 8).measure(lambda _: None)

    assert scores[0].score.num_matched_tokens == long[1].score.num_matched_tokens
    assert scores[0].score.kl != pytest.approx(long[1].score.kl, rel=1e-3)


def test_chains_whose_text_becomes_too_short_give_no_scores() -> None:
    assert measure(["shift"], count=1, num_tokens=20) == []


def test_a_chain_too_long_for_the_model_is_refused_by_its_id() -> None:
    with pytest.raises(HandoffError, match="chain 'chain 0' may need"):
        ChainFidelity(random_parts(), prompt, chains(1), ["shift"], 600, 8)


def hop_score(case: str, hop: int, policy: str, kl: float) -> HopScore:
    return HopScore(hop, Score(case, policy, 300, 100, 0.25, kl, kl, 0.5, 0.5, False))


def report() -> ChainReport:
    scores = [
        hop_score(case, hop, policy, factor * scale * kl)
        for case, scale in (("a", 1.0), ("b", 3.0))
        for hop, kl in ((1, 0.01), (2, 0.03), (3, 0.015))
        for policy, factor in (("shift", 1.0), ("epic", 0.5))
    ]
    subject = Subject("tiny", "abc", "float32", "relaykv fidelity --test chain")
    return ChainReport(subject, 3, 32, tuple(drifts(scores)), tuple(scores))


def test_drift_is_the_mean_at_every_hop_and_the_last_against_the_first() -> None:
    shift, epic = report().drifts

    assert shift.kl == pytest.approx((0.02, 0.06, 0.03))
    assert epic.kl == pytest.approx((0.01, 0.03, 0.015))
    assert shift.ratio == pytest.approx(1.5)
    assert shift.ratio_interval is not None
    # All chains grow alike, however far apart they are.
    assert (shift.ratio_interval.low, shift.ratio_interval.high) == pytest.approx((1.5, 1.5))
    assert (shift.intervals[0].low, shift.intervals[0].high) == pytest.approx((0.01, 0.03))
    assert shift.next_token == 0.5


def test_the_table_has_a_column_for_every_hop() -> None:
    text = markdown(report())
    assert "2 of 3 chains relayed at each of 3 hops" in text
    assert (
        "| `epic` | 25.0 % | 0.0100 | 0.0300 | 0.0150 | 1.50 (1.50-1.50) | 50.0 % |"
        in text.splitlines()
    )
    assert {row.count("|") for row in text.splitlines() if row.startswith("|")} == {8}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_drift(report(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
