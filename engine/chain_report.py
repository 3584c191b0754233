"""How policies drift along chains of agents: sums of scores, and a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaykv.engine.bootstrap import Interval, PairedBootstrap
from relaykv.engine.fidelity_report import Subject, percent
from relaykv.engine.fidelity_scores import Score


@dataclass(frozen=True, slots=True)
class HopScore:
    """One chain at one hop under one policy."""

    hop: int  # from 1
    score: Score


@dataclass(frozen=True, slots=True)
class Drift:
    """One policy along all chains."""

    policy: str
    computed_share: float
    next_token: float  # at the last hop
    kl: tuple[float, ...]  # mean over chains, by hop
    intervals: tuple[Interval, ...]  # by hop
    ratio: float | None  # of the last hop's divergence to the first hop's
    ratio_interval: Interval | None


@dataclass(frozen=True, slots=True)
class ChainReport:
    """Of chains under several policies."""

    subject: Subject
    num_chains: int  # that were tried; those that relayed at every hop are in `scores`
    num_compared: int  # positions of each answer whose distributions were compared, at most
    drifts: tuple[Drift, ...]
    scores: tuple[HopScore, ...]

    @property
    def num_relayed(self) -> int:
        """Chains that relayed at every hop."""
        return len({each.score.case for each in self.scores})


def drifts(scores: Sequence[HopScore]) -> list[Drift]:
    """One for each policy; every chain has been scored at every hop under every policy."""
    policies = dict.fromkeys(each.score.policy for each in scores)
    return [_drift([s for s in scores if s.score.policy == policy]) for policy in policies]


def markdown(report: ChainReport) -> str:
    """A table with one line for each policy, and what its columns mean."""
    num_hops = len(report.drifts[0].kl)
    hops = [f"hop {hop}" for hop in range(1, num_hops + 1)]
    heads = ["policy", "computed", *hops, "last to first (95 %)", "next token, last hop"]
    rows = [_cells(drift) for drift in sorted(report.drifts, key=lambda d: d.computed_share)]
    lines = [heads, ["---"] * len(heads), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    subject = report.subject
    return (
        f"{subject.model} ({subject.fingerprint}), {subject.dtype}: {report.num_relayed} of "
        f"{report.num_chains} chains relayed at each of {num_hops} hops.\n\n"
        f"`{subject.command}`\n\n{table}\n\n"
        "Mean KL in nats of the next-token distribution from the full prefill's, over the first "
        f"{report.num_compared} positions of its greedy answer, at every hop; a policy relays at "
        "each what it has itself relayed at the one before. *computed*: share of the layer-tokens "
        "of text that could be relayed. Intervals: bootstrap over chains.\n"
    )


def _drift(scores: Sequence[HopScore]) -> Drift:
    hops = sorted({each.hop for each in scores})
    by_hop = [[each.score for each in scores if each.hop == hop] for hop in hops]
    bootstrap = PairedBootstrap(np.array([[score.kl for score in hop] for hop in by_hop]).T)
    kl = tuple(statistics.fmean(score.kl for score in hop) for hop in by_hop)
    return Drift(
        policy=scores[0].score.policy,
        computed_share=statistics.fmean(each.score.computed_share for each in scores),
        next_token=statistics.fmean(score.next_token for score in by_hop[-1]),
        kl=kl,
        intervals=tuple(bootstrap.mean(index) for index in range(len(hops))),
        ratio=kl[-1] / kl[0] if kl[0] > 0 else None,
        ratio_interval=bootstrap.ratio(len(hops) - 1, 0),
    )


def _cells(drift: Drift) -> list[str]:
    ratio = "" if drift.ratio is None else f"{drift.ratio:.2f}"
    if drift.ratio_interval is not None:
        ratio += f" ({drift.ratio_interval.low:.2f}-{drift.ratio_interval.high:.2f})"
    return [
        f"`{drift.policy}`",
        percent(drift.computed_share),
        *(f"{kl:.4f}" for kl in drift.kl),
        ratio,
        percent(drift.next_token),
    ]
