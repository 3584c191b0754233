"""Chains of agents: each reads what the one before it has written.

A file of chains is JSON Lines, one object a line:

    {"id": "...", "domain": "...", "agents": [{"system": "...", "user_template": "..."}, ...]}

`domain` may be missing. The first agent's template is its whole task; every other one's holds
`{text}` once, where the text of the agent before it goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaykv.engine.handoff import SHIPPED, json_object, json_text, read_lines

_PLACEHOLDER = "{text}"


@dataclass(frozen=True, slots=True)
class ChainAgent:
    """One agent of a chain."""

    system: str
    user_template: str

    def user(self, text: str) -> str:
        """The user message with another agent's text in its place."""
        return self.user_template.replace(_PLACEHOLDER, text)


@dataclass(frozen=True, slots=True)
class Chain:
    """Agents in the order in which they write; there is one hop less than there are agents."""

    id: str
    domain: str
    agents: tuple[ChainAgent, ...]

    @property
    def num_hops(self) -> int:
        return len(self.agents) - 1


def shipped_chains() -> list[Chain]:
    """The chains that come with the package, of six hops each."""
    return read_chains(SHIPPED / "chains.jsonl")


def read_chains(path: Path) -> list[Chain]:
    """Reads and checks a file of chains; empty lines are skipped.

    Raises:
        HandoffError: the file cannot be read, has no chains, a line is not one, or not all
            chains have the same number of agents.
    """
    num_agents: set[int] = set()

    def parse(entry: Any) -> Chain:
        chain = _chain(entry)
        num_agents.add(len(chain.agents))
        if len(num_agents) > 1:
            raise ValueError("agents: there must be as many as in the lines above")
        return chain

    return read_lines(path, parse)


def _chain(entry: Any) -> Chain:
    fields = json_object(entry, "the line", ("id", "agents"), ("domain",))
    agents = fields["agents"]
    if not isinstance(agents, list) or len(agents) < 2:
        raise ValueError("agents: a list of at least two is expected")
    return Chain(
        id=json_text(fields["id"], "id"),
        domain=json_text(fields.get("domain", ""), "domain", may_be_empty=True),
        agents=tuple(_agent(agent, index) for index, agent in enumerate(agents, start=1)),
    )


def _agent(entry: Any, number: int) -> ChainAgent:
    where = f"agent {number}"
    fields = json_object(entry, where, ("system", "user_template"))
    template = json_text(fields["user_template"], f"{where}: user_template")
    expected = 0 if number == 1 else 1
    if template.count(_PLACEHOLDER) != expected:
        times = "must not stand in it" if number == 1 else "must stand in it once"
        raise ValueError(f"{where}: user_template: {_PLACEHOLDER} {times}")
    return ChainAgent(json_text(fields["system"], f"{where}: system", may_be_empty=True), template)
