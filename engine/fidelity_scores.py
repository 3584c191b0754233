"""How near policies' answers come to those of a full prefill: single scores, and their sums.

A policy's rival is the best published method, by mean divergence, that computes as much or less.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from relaykv.engine.bootstrap import Interval, PairedBootstrap

# arXiv 2410.15332, 2405.16444, 2603.13289, 2510.12872; `shift` is where all of them start.
_PUBLISHED = ("shift", "epic", "cacheblend", "relay", "kvcomm")


@dataclass(frozen=True, slots=True)
class Score:
    """One prompt under one policy, against a full prefill of it."""

    case: str
    policy: str
    num_prompt_tokens: int
    num_matched_tokens: int  # that stand in the session's recordings
    computed_share: float  # of their layer-tokens
    kl: float  # nats, mean over the answer's first positions
    first_kl: float  # at the first of them
    next_token: float  # share of these positions with the same likeliest token
    greedy: float  # share of the greedy answer before the first token that differs
    same_answer: bool  # no token of the greedy answer differs
    right: bool | None = None  # whether that holds what was asked for; None: nothing was


@dataclass(frozen=True, slots=True)
class Summary:
    """All scores of one policy. Shares are from 0 to 1."""

    policy: str
    computed_share: float
    kl: float
    kl_interval: Interval
    first_kl: float
    next_token: float
    greedy: float
    same_answer: float
    right: float | None  # share of the answers that were asked for; None: none were
    rival: str | None = None
    ratio: float | None = None  # mean divergence to the rival's
    ratio_interval: Interval | None = None


def is_published(policy: str) -> bool:
    """Whether others have published a policy; its name may be followed by settings of its own."""
    base = policy.partition(" ")[0].partition("@")[0]  # without bands or a share
    return base in _PUBLISHED


def common_share(reference: Sequence[int], other: Sequence[int]) -> float:
    """Share of `reference`, which is not empty, before the first place at which `other` differs."""
    places = (i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b)
    return next(places, min(len(reference), len(other))) / len(reference)


def computed_share(relayed: int, recomputed_share: float, matched: int) -> float:
    """Share of the layer-tokens of matched tokens that was computed.

    Args:
        relayed: tokens that were relayed; the other matched ones were computed in full.
        recomputed_share: of the relayed ones' layer-tokens, computed again.
    """
    return (relayed * recomputed_share + (matched - relayed)) / matched


def summarise(scores: Sequence[Score]) -> list[Summary]:
    """One summary for each policy, in the order in which policies first occur.

    All policies have been scored on the same cases.
    """
    policies = list(dict.fromkeys(score.policy for score in scores))
    by_policy = [[score for score in scores if score.policy == policy] for policy in policies]
    bootstrap = PairedBootstrap(np.array([[s.kl for s in of] for of in by_policy]).T)
    summaries = [_summary(of, bootstrap.mean(way)) for way, of in enumerate(by_policy)]
    return [_with_rival(index, summaries, bootstrap) for index in range(len(summaries))]


def _summary(scores: Sequence[Score], interval: Interval) -> Summary:
    asked = [score.right for score in scores if score.right is not None]
    return Summary(
        policy=scores[0].policy,
        computed_share=statistics.fmean(s.computed_share for s in scores),
        kl=statistics.fmean(s.kl for s in scores),
        kl_interval=interval,
        first_kl=statistics.fmean(s.first_kl for s in scores),
        next_token=statistics.fmean(s.next_token for s in scores),
        greedy=statistics.fmean(s.greedy for s in scores),
        same_answer=statistics.fmean(s.same_answer for s in scores),
        right=statistics.fmean(asked) if asked else None,
    )


def _with_rival(index: int, summaries: Sequence[Summary], bootstrap: PairedBootstrap) -> Summary:
    mine = summaries[index]
    rivals = [
        (other.kl, place)
        for place, other in enumerate(summaries)
        if place != index
        and is_published(other.policy)
        and other.computed_share <= mine.computed_share
    ]
    if not rivals:
        return mine
    kl, place = min(rivals)
    return replace(
        mine,
        rival=summaries[place].policy,
        ratio=mine.kl / kl if kl > 0 else None,
        ratio_interval=bootstrap.ratio(index, place),
    )
