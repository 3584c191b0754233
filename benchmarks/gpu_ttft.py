"""Section of the GPU check: time to first token of every agent and policy, in the papers' set-ups.

One chain of agents, in process. Before agent i writes, its prompt is sent with every policy in
turn; the prefix of each is in the exact prefix cache, and random tokens behind it keep the rest
from hitting an earlier measurement. `cold` is `full` with nothing cached: the papers' baseline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_engines import build, served
from gpu_machine import Machine
from gpu_report import Recorder, table
from model_shapes import ModelShape
from paper_setups import Piece, Setup, cold
from phase_costs import Accelerator, floor_s, prefill
from random_model import CoreSizes, random_ids, random_model, request, serve, tokens_of

from relaykv.engine.config import ModelConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.policy import Deviation, Policy, Selection, builtin_policies
from relaykv.engine.prefill_plan import SpanKind
from relaykv.engine.relay_report import RelayReport
from relaykv.engine.request import RelayOptions

COLD = "cold"
# `relay` with a fixed share of selected tokens: what random weights deviate by is no measure.
RELAY_20 = "relay 20 %"
POLICIES = (COLD, "full", "shift", "epic", "cacheblend", "relay", RELAY_20)
_SESSION = "chain"
_MS = 1e3


def measure_ttft(
    machine: Machine,
    recorder: Recorder,
    setup: Setup,
    shape: ModelShape,
    accelerator: Accelerator,
    repeats: int,
) -> None:
    """Measures a whole chain and prints its table; stops at an agent when time is up."""
    model = random_model(shape, machine.dtype, machine.device, machine.kernels())
    last = setup.agents[-1]
    length = setup.num_prompt_tokens(last) + setup.num_output
    # The chain's recordings, and a prompt beside them.
    kv_tokens = sum(setup.num_prompt_tokens(i) + setup.num_output for i in range(1, last + 1))
    sizes = CoreSizes(length, kv_tokens + 2 * length, max(16384, length))
    policies = {**builtin_policies(shape.config.num_layers, shape.bands)}
    policies[RELAY_20] = relay_20(policies["relay"])
    core = build(machine, model, shape, served(machine, (1,)), sizes, (policies[RELAY_20],))
    chain = Chain(machine, core, setup, shape.config)
    rows = [_head(setup)]
    measured = [agent for agent in range(1, last + 1) if agent in setup.agents]
    for agent in range(1, measured[0]):
        chain.write(agent)
    for agent in recorder.each((f"agent {agent}", agent) for agent in measured):
        for entry in chain.measure(agent, repeats):
            _add_floor(entry, setup, shape, policies, accelerator)
            wrong = _check_plan(entry, setup)
            if wrong is not None:
                recorder.problem(wrong)
            recorder.append("measured", entry)
            rows.append(_row(entry, setup))
        if agent != last:
            chain.write(agent)
    recorder.say(table(rows))
    recorder.say(
        "computed: prompt tokens that every layer computes; again: relayed ones that the policy\n"
        f"computes again; floor: phase_costs.py with these counts, on {accelerator.name};\n"
        f"paper: {setup.paper.source} on {setup.paper.machine}, against its `cold`"
    )


@dataclass(frozen=True, slots=True)
class _First:
    """Up to the first token of one prompt."""

    seconds: float
    report: RelayReport


class Chain:
    """Agents that write one after another in one session."""

    def __init__(
        self, machine: Machine, core: EngineCore, setup: Setup, config: ModelConfig
    ) -> None:
        self._machine = machine
        self._core = core
        self._setup = setup
        self._vocab_size = config.vocab_size
        self._outputs: list[list[int]] = []
        self._num_prompts = 0
        self._question = self._ids("question", setup.num_question)

    def write(self, agent: int) -> None:
        """Lets an agent write its text into the session, by decoding."""
        prompt = self._prompt(self._prefix(agent))
        # `full` writes exact KV; drawing keeps random weights from repeating one token.
        relay = RelayOptions(session=_SESSION, policy="full")
        sampled = request(
            f"writer {agent}", prompt, self._setup.num_output, relay, temperature=1.0, seed=agent
        )
        self._outputs.append(tokens_of(serve(self._core, sampled)[sampled.request_id]))

    def measure(self, agent: int, repeats: int) -> Iterator[dict[str, Any]]:
        """One entry per policy; the policies take turns, the first round is thrown away."""
        warm = request("warm", [*self._prefix(agent), *self._ids("warm", 16)], 1)
        serve(self._core, warm)
        firsts: dict[str, list[_First]] = {policy: [] for policy in POLICIES}
        for _ in range(repeats + 1):
            for policy in POLICIES:
                firsts[policy].append(self._first(agent, policy))
        cold_s, full_s = _median_s(firsts[COLD]), _median_s(firsts["full"])
        for policy, rounds in firsts.items():
            seconds = _median_s(rounds)
            report = rounds[-1].report
            yield {
                "agent": agent,
                "policy": policy,
                "median_ms": seconds * _MS,
                "min_ms": min(first.seconds for first in rounds[1:]) * _MS,
                "to_full": full_s / seconds,
                "to_cold": cold_s / seconds,
                "prefix": report.num_prefix_tokens,
                "relayed": report.num_relayed_tokens,
                "recomputed": report.num_recomputed_tokens,
                "computed": report.num_computed_tokens,
                "recomputed_share": report.recomputed_share,
            }

    def _first(self, agent: int, policy: str) -> _First:
        prefix = self._prefix(agent)
        relay = RelayOptions(session=_SESSION, policy=policy, store=False)
        if policy == COLD:
            prefix = self._ids("nobody's", len(prefix))
            relay = replace(relay, policy="full")
        item = request(f"measured {self._num_prompts}", self._prompt(prefix), 1, relay)
        self._machine.wait()
        started = time.perf_counter()
        ((output, *_),) = serve(self._core, item).values()
        seconds = time.perf_counter() - started
        assert output.relay is not None  # a first output has it
        return _First(seconds, output.relay)

    def _prompt(self, prefix: list[int]) -> list[int]:
        """Of the next agent to write, as `Setup.pieces` describes it.

        The short texts between the others are new every time.
        """
        self._num_prompts += 1
        texts = [self._question, *self._outputs] if self._question else self._outputs
        prompt = [*prefix, *self._glue(0)]
        for index, text in enumerate(texts, start=1):
            prompt += [*text, *self._glue(index)]
        return prompt

    def _glue(self, index: int) -> list[int]:
        return self._ids(f"glue {index}", self._setup.num_glue)

    def _prefix(self, agent: int) -> list[int]:
        return random_ids(f"prefix {agent}", self._setup.num_prefix, self._vocab_size)

    def _ids(self, name: str, count: int) -> list[int]:
        return random_ids(f"{name} {self._num_prompts}", count, self._vocab_size)


def relay_20(relay: Policy) -> Policy:
    """The policy `relay` that selects the fifth of a segment which deviates most."""
    selection = Selection(deviation=Deviation.COSINE, deviation_share=0.2, expected_share=0.2)
    return replace(relay, name=RELAY_20, selection=selection)


def planned_pieces(setup: Setup, agent: int, policy: str) -> tuple[Piece, ...]:
    """What is to be hit, relayed and computed of a prompt."""
    pieces = setup.pieces(agent, relays=policy not in (COLD, "full"))
    return cold(pieces) if policy == COLD else pieces


def _check_plan(entry: dict[str, Any], setup: Setup) -> str | None:
    """What is wrong when a prompt was not treated as the set-up means it."""
    wanted = dict.fromkeys(SpanKind, 0)
    for piece in planned_pieces(setup, entry["agent"], entry["policy"]):
        wanted[piece.kind] += piece.num_tokens
    relayed = entry["relayed"] + entry["recomputed"]
    found = {SpanKind.PREFIX: entry["prefix"], SpanKind.RELAY: relayed,
             SpanKind.COMPUTE: entry["computed"]}  # fmt: skip
    if found == wanted:
        return None
    counts = ", ".join(f"{kind.value} {found[kind]} for {wanted[kind]}" for kind in SpanKind)
    return f"agent {entry['agent']}, {entry['policy']}: {counts}"


def _add_floor(
    entry: dict[str, Any],
    setup: Setup,
    shape: ModelShape,
    policies: Mapping[str, Policy],
    accelerator: Accelerator,
) -> None:
    policy = policies["full" if entry["policy"] == COLD else entry["policy"]]
    pieces = planned_pieces(setup, entry["agent"], entry["policy"])
    costs = prefill(shape.config, pieces, _as_measured(policy, entry))
    floor_ms = floor_s(costs, accelerator) * _MS
    entry["floor_ms"] = floor_ms
    entry["over_floor"] = entry["median_ms"] / floor_ms


def _as_measured(policy: Policy, entry: dict[str, Any]) -> Policy:
    """The policy with the share of tokens that it really selected."""
    relayed = entry["relayed"] + entry["recomputed"]
    if not relayed:
        return policy
    share = entry["recomputed"] / relayed
    selection = replace(policy.selection, expected_share=share, deviation_share=None)
    return replace(policy, selection=selection)


def _head(setup: Setup) -> tuple[str, ...]:
    return (
        "policy", "agent", "prefix", "relayed", "again", "computed", "ms", "to full", "to cold",
        "floor ms", "over floor", *(f"paper {method}" for method in setup.paper.reuse_ms),
    )  # fmt: skip


def _row(entry: dict[str, Any], setup: Setup) -> tuple[str, ...]:
    paper = setup.paper
    # Random weights are no measure of what `relay` selects: the paper stands beside a fifth.
    ratios = [
        f"{paper.ratio(method, entry['agent']):.2f}"
        if entry["policy"] == ("cacheblend" if method == "cacheblend" else RELAY_20)
        else ""
        for method in paper.reuse_ms
    ]
    return (
        entry["policy"],
        str(entry["agent"]),
        str(entry["prefix"]),
        str(entry["relayed"]),
        str(entry["recomputed"]),
        str(entry["computed"]),
        f"{entry['median_ms']:.2f}",
        f"{entry['to_full']:.2f}",
        f"{entry['to_cold']:.2f}",
        f"{entry['floor_ms']:.2f}",
        f"{entry['over_floor']:.1f}",
        *ratios,
    )


def _median_s(rounds: list[_First]) -> float:
    return statistics.median(first.seconds for first in rounds[1:])
