from __future__ import annotations

import pytest
from paper_setups import Setup, cold, kvcomm, relaycaching

from relaykv.engine.prefill_plan import SpanKind


def tokens(setup: Setup, agent: int, kind: SpanKind, relays: bool = True) -> int:
    return sum(p.num_tokens for p in setup.pieces(agent, relays) if p.kind is kind)


def test_relaycachings_last_agent_reads_four_outputs() -> None:
    setup = relaycaching()
    assert tokens(setup, 5, SpanKind.PREFIX) == 512
    assert tokens(setup, 5, SpanKind.RELAY) == 4 * 2048 - 1
    assert tokens(setup, 5, SpanKind.COMPUTE) == 1 + 5 * 16
    assert setup.num_prompt_tokens(5) == 512 + 4 * 2048 + 5 * 16


def test_kvcomms_question_is_new_to_the_first_agent_only() -> None:
    setup = kvcomm()
    assert tokens(setup, 1, SpanKind.RELAY) == 0
    assert tokens(setup, 1, SpanKind.COMPUTE) == 1024 + 2 * 16
    assert tokens(setup, 2, SpanKind.RELAY) == 1024 + 511


@pytest.mark.parametrize("setup", [relaycaching(), kvcomm()])
def test_the_plain_prompt_has_the_same_length_and_relays_nothing(setup: Setup) -> None:
    for agent in setup.agents:
        plain = setup.pieces(agent, relays=False)
        assert tokens(setup, agent, SpanKind.RELAY, relays=False) == 0
        assert sum(piece.num_tokens for piece in plain) == setup.num_prompt_tokens(agent)
        (piece,) = cold(plain)
        assert (piece.kind, piece.num_tokens) == (
            SpanKind.COMPUTE,
            setup.num_prompt_tokens(agent),
        )


def test_the_papers_ratios_are_those_they_print() -> None:
    relay = [relaycaching().paper.ratio("relay", agent) for agent in (2, 3, 4, 5)]
    assert relay == pytest.approx([2.10, 3.16, 4.39, 4.71], abs=0.006)
    ratios = [kvcomm().paper.ratio("kvcomm", agent) for agent in (1, 2, 3, 4, 5)]
    assert ratios == pytest.approx([1.11, 5.06, 6.14, 6.85, 7.82], abs=0.006)
