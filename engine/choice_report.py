"""Whether policies choose what a full prefill chooses: sums of scores, and a table for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaykv.engine.bootstrap import Interval, PairedBootstrap
from relaykv.engine.fidelity_report import Subject, percent

FULL = "full"


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One choice."""

    trial: str
    variant: str  # of the trial
    policy: str  # `full` too
    computed_share: float  # of the layer-tokens of text that could be relayed
    place: int  # of what was chosen, among the choices
    same: bool  # as the full prefill
    kl: float  # from the full prefill's, nats, of the distribution over the choices
    right: bool | None  # None: no choice is right
    log_odds: float  # of the first choice to the second; turned round with the role


@dataclass(frozen=True, slots=True)
class ChoiceSummary:
    """All choices of one policy. Shares are from 0 to 1."""

    policy: str
    computed_share: float
    same: float
    same_interval: Interval
    kl: float
    right: float | None
    turn: float | None  # what turning the role changes in the log-odds, nats; mean over trials


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """Of trials of one kind under several policies."""

    subject: Subject
    num_trials: int  # that were tried; those that relayed something are in `scores`
    summaries: tuple[ChoiceSummary, ...]  # of `full` too
    scores: tuple[ChoiceScore, ...]

    @property
    def num_relayed(self) -> int:
        """Trials that relayed something."""
        return len({score.trial for score in self.scores})


def summarise_choices(scores: Sequence[ChoiceScore]) -> list[ChoiceSummary]:
    """One for each policy; all have chosen in the same trials."""
    policies = dict.fromkeys(score.policy for score in scores)
    return [_summary([s for s in scores if s.policy == policy]) for policy in policies]


def markdown(report: ChoiceReport) -> str:
    """A table with one line for each policy, the cheapest first, and what its columns mean."""
    has_right = any(summary.right is not None for summary in report.summaries)
    heads = ["policy", "computed", "same choice (95 %)", "KL of the choices"]
    heads += ["right", "turn"] if has_right else []
    rows = sorted(report.summaries, key=lambda summary: summary.computed_share)
    lines = [heads, ["---"] * len(heads), *(_cells(summary) for summary in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    subject = report.subject
    return (
        f"{subject.model} ({subject.fingerprint}), {subject.dtype}: {report.num_relayed} of "
        f"{report.num_trials} trials relayed text.\n\n"
        f"`{subject.command}`\n\n{table}\n\n{_legend(report, has_right)}\n"
    )


def _summary(scores: Sequence[ChoiceScore]) -> ChoiceSummary:
    trials = list(dict.fromkeys(score.trial for score in scores))
    by_trial = [[score for score in scores if score.trial == trial] for trial in trials]
    same = [statistics.fmean(score.same for score in of) for of in by_trial]
    right = [score.right for score in scores if score.right is not None]
    return ChoiceSummary(
        policy=scores[0].policy,
        computed_share=statistics.fmean(score.computed_share for score in scores),
        same=statistics.fmean(score.same for score in scores),
        same_interval=PairedBootstrap(np.array(same)[:, None]).mean(0),
        kl=statistics.fmean(score.kl for score in scores),
        right=statistics.fmean(right) if right else None,
        turn=statistics.fmean(sum(s.log_odds for s in of) for of in by_trial) if right else None,
    )


def _cells(summary: ChoiceSummary) -> list[str]:
    interval = summary.same_interval
    around = f"{100 * interval.low:.0f}-{100 * interval.high:.0f}"
    cells = [
        f"`{summary.policy}`",
        percent(summary.computed_share),
        f"{percent(summary.same)} ({around})",
        f"{summary.kl:.4f}",
    ]
    if summary.right is not None and summary.turn is not None:
        cells += [percent(summary.right), f"{summary.turn:+.2f}"]
    return cells


def _legend(report: ChoiceReport, has_right: bool) -> str:
    full = [score for score in report.scores if score.policy == FULL]
    place, count = Counter(score.place for score in full).most_common(1)[0]
    lines = [
        f"{len(full)} choices. *computed*: share of the layer-tokens of text that could be "
        "relayed; *same choice*: as the full prefill; *KL of the choices*: divergence in nats of "
        "the distribution over them from the full prefill's. Intervals: bootstrap over trials. "
        f"The full prefill takes choice {place + 1} in {percent(count / len(full))} of them."
    ]
    if has_right:
        lines.append(
            "*right*: share of right choices, half of which are turned round by the role; "
            "*turn*: nats by which turning the role moves the log-odds towards what is right."
        )
    return " ".join(lines)
