"""The table, the file and the picture of a fidelity report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from relaykv.engine.fidelity_report import (
    FidelityReport,
    FullAnswers,
    Subject,
    full_answers,
    markdown,
    write_json,
)
from relaykv.engine.fidelity_scores import Score, summarise
from relaykv.engine.frontier_plot import draw_frontier, frontier


def report() -> FidelityReport:
    scores = tuple(
        Score(case, policy, 300, 120, computed, kl, 2 * kl, 0.9, 0.75, False, right)
        for case, right in (("a", None), ("b", True))
        for policy, computed, kl in (
            ("epic", 0.125, 0.03),
            ("shift", 0.0, 0.06),
            ("auto", 0.125, 0.015),
            ("relay", 0.25, 0.04),
        )
    )
    return FidelityReport(
        Subject("tiny", "abc", "float32", "relaykv fidelity --model tiny"),
        3,
        0,
        32,
        64,
        FullAnswers(1, 1),
        tuple(summarise(scores)),
        scores,
    )


def test_the_table_has_a_line_for_each_policy_the_cheapest_first_and_full_at_the_end() -> None:
    text = markdown(report())

    lines = [line for line in text.splitlines() if line.startswith("| `")]
    names = [line.split("`")[1] for line in lines]
    assert names == ["shift", "epic", "auto", "relay", "full"]
    assert lines[2] == (
        "| `auto` | 12.5 % | 0.0150 (0.0150-0.0150) | 0.0300 | 90.0 % | 75.0 % | 0.0 % | 100.0 % "
        "| 0.50 (0.50-0.50) of `epic` |"
    )
    assert "2 of 3 hand-offs could relay 240 tokens" in text
    assert "`relaykv fidelity --model tiny`" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {10}


def test_there_is_no_column_of_answers_where_nothing_was_asked() -> None:
    text = markdown(replace(report(), full=FullAnswers(0, 0)))
    assert "right answer" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {9}


def test_the_file_holds_every_score_and_two_writings_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "handoffs.json"
    write_json(asdict(report()), path)
    first = path.read_bytes()
    write_json(asdict(report()), path)

    assert path.read_bytes() == first
    content = json.loads(first)
    assert len(content["scores"]) == 8
    assert content["scores"][0]["kl"] == 0.03
    assert content["summaries"][2]["ratio_interval"] == {"low": 0.5, "high": 0.5}
    assert [file.name for file in path.parent.iterdir()] == ["handoffs.json"]


def test_answers_of_full_prefills_are_counted_where_there_are_any() -> None:
    assert full_answers([None, True, False, True]) == FullAnswers(3, 2)
    assert full_answers([]) == FullAnswers(0, 0)


def test_the_frontier_leaves_out_what_a_cheaper_policy_betters() -> None:
    assert [s.policy for s in frontier(report().summaries)] == ["shift", "auto"]
    published = [s for s in report().summaries if s.policy != "auto"]
    assert [s.policy for s in frontier(published)] == ["shift", "epic"]


@pytest.mark.parametrize("names", [("shift", "epic", "auto", "relay"), ("auto",)])
def test_a_picture_is_drawn_also_without_a_published_policy_and_with_no_divergence(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    summaries = [replace(s, kl=0.0) for s in report().summaries if s.policy in names]
    draw_frontier(replace(report(), summaries=tuple(summaries)), tmp_path / "a.png")

    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
