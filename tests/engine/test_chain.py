"""Chains of agents: their file format, and those that are shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relaykv.engine.chain import read_chains, shipped_chains
from relaykv.engine.handoff import HandoffError


def agent(template: str) -> dict[str, str]:
    return {"system": "You write.", "user_template": template}


def line(**fields: Any) -> str:
    agents = [agent("Begin."), agent("Read {text} now.")]
    return json.dumps({"id": "a", "domain": "tests", "agents": agents, **fields})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "chains.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_shipped_chains_have_six_hops_and_another_role_for_every_agent() -> None:
    chains = shipped_chains()

    assert len(chains) >= 6
    assert len({chain.domain for chain in chains}) == len(chains)
    for chain in chains:
        assert chain.num_hops == 6
        assert len({agent.system for agent in chain.agents}) == 7
        for later in chain.agents[1:]:
            before, behind = later.user_template.split("{text}")
            assert min(len(before.split()), len(behind.split())) >= 15


def test_a_text_takes_its_place_and_its_braces_mean_nothing(tmp_path: Path) -> None:
    (chain,) = read_chains(write(tmp_path, line(), ""))

    assert (chain.id, chain.domain, chain.num_hops) == ("a", "tests", 1)
    assert chain.agents[0].user("nothing") == "Begin."
    assert chain.agents[1].user("{text}{") == "Read {text}{ now."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line(agents=[agent("Begin.")]), "agents: a list of at least two is expected"),
        (line(agents=[agent("{text}"), agent("{text}")]), "agent 1: .* must not stand in it"),
        (line(agents=[agent("Begin."), agent("Read.")]), "agent 2: .* must stand in it once"),
        (line(agents=[agent("Begin."), agent("{text} {text}")]), "must stand in it once"),
        (line(agents=[agent("Begin."), {"system": ""}]), "'user_template' is missing"),
        (line(answer="x"), "the field 'answer' is unknown"),
        ('{"id": "a"}', "the field 'agents' is missing"),
    ],
)
def test_a_line_that_is_no_chain_is_refused_with_its_number(
    text: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(HandoffError, match=f"line 2: .*{reason}"):
        read_chains(write(tmp_path, line(id="first"), text))


def test_all_chains_of_a_file_are_equally_long(tmp_path: Path) -> None:
    longer = line(id="b", agents=[agent("Begin."), agent("{text}"), agent("{text}")])
    with pytest.raises(HandoffError, match="line 2: agents: there must be as many"):
        read_chains(write(tmp_path, line(), longer))
