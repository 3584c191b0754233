from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_report import DRY_PREFIX, Budget, Recorder, SectionResult, printer, run_guarded, table


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_items_come_while_time_is_left_and_the_others_are_named() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    left_out: list[str] = []
    taken = []
    for item in budget.each([("a", 1), ("b", 2), ("c", 3), ("d", 4)], left_out):
        taken.append(item)
        clock.now += 6.0
    assert taken == [1, 2]
    assert left_out == ["c", "d"]


def test_everything_recorded_is_in_the_file_at_once(tmp_path: Path) -> None:
    result = SectionResult("s", tmp_path / "parts" / "s.json")
    recorder = Recorder(result, Budget(60), lambda _: None)

    def written() -> dict[str, object]:
        values: dict[str, object] = json.loads(result.path.read_text())
        return values

    recorder.record("a", 1)
    assert written()["data"] == {"a": 1}
    recorder.append("list", {"b": 2})
    recorder.append("list", {"b": 3})
    assert written()["data"] == {"a": 1, "list": [{"b": 2}, {"b": 3}]}
    recorder.problem("odd")
    assert (written()["status"], written()["problems"]) == ("running", ["odd"])
    assert [path.name for path in result.path.parent.iterdir()] == ["s.json"]


def test_a_section_ends_done_when_nothing_was_wrong(tmp_path: Path) -> None:
    result = SectionResult("s", tmp_path / "s.json")
    run_guarded(result, Budget(60), lambda _: None, lambda recorder: recorder.record("x", 1))
    assert json.loads(result.path.read_text())["status"] == "done"


def test_leaving_something_out_is_said_and_no_failure(tmp_path: Path) -> None:
    result = SectionResult("s", tmp_path / "s.json")
    said: list[str] = []

    def section(recorder: Recorder) -> None:
        assert list(recorder.each([("late", 1)])) == []

    run_guarded(result, Budget(-1), said.append, section)
    assert (result.status, result.left_out) == ("done", ["late"])
    assert said == ["left out for want of time: late"]


def test_every_line_of_a_dry_text_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    printer(True)("one\ntwo\n")
    printer(False)("three")
    lines = capsys.readouterr().out.split("\n")
    assert lines == [f"{DRY_PREFIX}one", f"{DRY_PREFIX}two", DRY_PREFIX, "three", ""]


def test_columns_line_up() -> None:
    assert table([("a", "ms"), ("longer", "1.5")]) == "a        ms\nlonger  1.5"
