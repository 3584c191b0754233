"""What measuring fidelity has found out, as a table for people and as a file for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaykv.engine.bootstrap import Interval
from relaykv.engine.fidelity_scores import Score, Summary

_NUM_DIGITS = 6  # significant ones, of numbers in a file


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured, and how."""

    model: str
    fingerprint: str
    dtype: str
    command: str


@dataclass(frozen=True, slots=True)
class FullAnswers:
    """How the full prefill answered what it was asked."""

    num_asked: int  # hand-offs whose producers handed the answer on
    num_right: int


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """Of hand-offs under several policies."""

    subject: Subject
    num_handoffs: int  # that were tried; those that relayed something are in `scores`
    num_lessons: int  # hand-offs that policies which learn saw before
    num_compared: int  # positions of each answer whose distributions were compared, at most
    num_greedy: int  # tokens of each answer, at most
    full: FullAnswers
    summaries: tuple[Summary, ...]
    scores: tuple[Score, ...]

    @property
    def num_relayed(self) -> int:
        """Hand-offs that relayed something."""
        return len({score.case for score in self.scores})


def markdown(report: FidelityReport) -> str:
    """A table with one line for each policy, the cheapest first, and what its columns mean."""
    asked = report.full.num_asked
    heads = [
        "policy",
        "computed",
        "mean KL (95 %)",
        "first KL",
        "next token",
        f"greedy, {report.num_greedy}",
        "same answer",
        *(["right answer"] if asked else []),
        "to the best published at this cost (95 %)",
    ]
    right = [percent(report.full.num_right / asked)] if asked else []
    full = ["`full`", "100.0 %", "0", "0", "100.0 %", "100.0 %", "100.0 %", *right, ""]
    rows = sorted(report.summaries, key=lambda summary: summary.computed_share)
    lines = [heads, ["---"] * len(heads), *(_cells(s, asked > 0) for s in rows), full]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{_title(report)}\n\n{table}\n\n{_legend(report)}\n"


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report's fields, numbers rounded, in one step; makes the folder.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(_rounded(report), indent=1) + "\n"
    write_text(text, path)


def write_text(text: str, path: Path) -> None:
    """Writes a file in one step; makes its folder.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _title(report: FidelityReport) -> str:
    subject = report.subject
    matched = {score.case: score.num_matched_tokens for score in report.scores}
    taught = ""
    if report.num_lessons:
        taught = f" Policies that learn had seen {report.num_lessons} others."
    return (
        f"{subject.model} ({subject.fingerprint}), {subject.dtype}: {report.num_relayed} of "
        f"{report.num_handoffs} hand-offs could relay {sum(matched.values())} tokens."
        f"{taught}\n\n"
        f"`{subject.command}`"
    )


def _cells(summary: Summary, with_answers: bool) -> list[str]:
    right = "" if summary.right is None else percent(summary.right)
    return [
        f"`{summary.policy}`",
        percent(summary.computed_share),
        f"{summary.kl:.4f} ({_range(summary.kl_interval, 4)})",
        f"{summary.first_kl:.4f}",
        percent(summary.next_token),
        percent(summary.greedy),
        percent(summary.same_answer),
        *([right] if with_answers else []),
        _ratio(summary),
    ]


def _ratio(summary: Summary) -> str:
    if summary.ratio is None:
        return ""
    interval = summary.ratio_interval
    around = "" if interval is None else f" ({_range(interval, 2)})"
    return f"{summary.ratio:.2f}{around} of `{summary.rival}`"


def _range(interval: Interval, digits: int) -> str:
    return f"{interval.low:.{digits}f}-{interval.high:.{digits}f}"


def _legend(report: FidelityReport) -> str:
    lines = [
        "*computed*: share of the layer-tokens of text that could be relayed; *mean KL*: "
        "divergence in nats of the next-token distribution from the full prefill's, over the first "
        f"{report.num_compared} positions of its greedy answer, and *first KL* at the first; "
        "*next token*: share of these positions with the same likeliest token; *greedy*: share of "
        "the greedy answer before the first token that differs; *same answer*: share of answers "
        "in which none does."
    ]
    if report.full.num_asked:
        lines.append(
            f"*right answer*: share of {report.full.num_asked} answers that hold what was asked "
            "for and was handed on."
        )
    lines.append(
        "The last column divides the mean KL by that of the published policy with the lowest one "
        "among those that compute as much or less. Intervals: paired bootstrap over hand-offs."
    )
    return " ".join(lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_NUM_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def full_answers(right: Sequence[bool | None]) -> FullAnswers:
    """Counts the answers of full prefills; None: nothing was asked."""
    asked = [answer for answer in right if answer is not None]
    return FullAnswers(len(asked), sum(asked))
