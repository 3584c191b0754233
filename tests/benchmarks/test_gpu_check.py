"""The GPU check on a CPU: a whole dry run, and what becomes of sections that go wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from golden_files import load_golden
from gpu_machine import Machine, known_accelerator
from gpu_report import DRY_PREFIX, Recorder, SectionResult
from gpu_ttft import POLICIES

NAMES = [section.name for section in gpu_check.sections()]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit status, output and folder of one dry run of everything."""
    out = tmp_path_factory.mktemp("gpu_check")
    capture = pytest.MonkeyPatch()
    lines: list[str] = []
    capture.setattr("builtins.print", lambda *text, **_: lines.append(" ".join(map(str, text))))
    try:
        status = gpu_check.main(["--dry", "--out", str(out), "--seed", "1"])
    finally:
        capture.undo()
    return status, "\n".join(lines), out


def report(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    return values


def test_a_dry_run_does_every_section_without_a_problem(dry_run: tuple[int, str, Path]) -> None:
    status, _, out = dry_run
    values = report(out)
    assert [section["name"] for section in values["sections"]] == NAMES
    assert [(s["status"], s["problems"], s["error"]) for s in values["sections"]] == [
        ("done", [], None)
    ] * len(NAMES)
    assert status == 0


def test_every_line_of_a_dry_run_says_that_nothing_ran_on_a_gpu(
    dry_run: tuple[int, str, Path],
) -> None:
    _, text, out = dry_run
    assert text
    assert all(line.startswith(DRY_PREFIX) for line in text.splitlines())
    assert "nothing ran on a GPU" in DRY_PREFIX
    said = text.replace(DRY_PREFIX, "").lower()
    assert "passed" not in said
    assert "on cuda" not in said
    values = report(out)
    assert values["dry"] is True
    assert "nothing ran on a GPU" in values["note"]
    assert values["machine"]["device"] == "CPU"


def test_the_report_says_what_it_was_made_by(dry_run: tuple[int, str, Path]) -> None:
    values = report(dry_run[2])
    assert values["schema"] == 1
    assert values["command"].startswith("python benchmarks/gpu_check.py --dry --out ")
    assert values["commit"]
    assert values["machine"]["packages"]["torch"] == torch.__version__
    environment = values["sections"][0]["data"]
    assert environment["peaks"]["reached"]["operations_per_s"] > 0


def test_every_policy_is_timed_for_every_agent_of_both_papers(
    dry_run: tuple[int, str, Path],
) -> None:
    sections = {section["name"]: section["data"] for section in report(dry_run[2])["sections"]}
    for name, agents in (("ttft relaycaching", (2, 3, 4, 5)), ("ttft kvcomm", (1, 2, 3, 4, 5))):
        measured = sections[name]["measured"]
        expected = [(agent, policy) for agent in agents for policy in POLICIES]
        assert [(entry["agent"], entry["policy"]) for entry in measured] == expected
        for entry in measured:
            assert entry["median_ms"] > 0
            assert entry["over_floor"] == pytest.approx(entry["median_ms"] / entry["floor_ms"])
        full = [entry for entry in measured if entry["policy"] == "full"]
        assert {entry["prefix"] for entry in full} == {16}  # prefix caching is on
        assert {entry["prefix"] for entry in measured if entry["policy"] == "cold"} == {0}


def test_goldens_of_a_dry_run_say_so(dry_run: tuple[int, str, Path]) -> None:
    paths = sorted((dry_run[2] / "goldens").glob("*.npz"))
    assert len(paths) == 10
    assert all(load_golden(path).origin["dry"] for path in paths)


def test_without_a_gpu_it_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "gpu_check: torch finds no CUDA device here; --dry runs on a CPU\n"
    assert not list(tmp_path.iterdir())


def test_what_the_budget_leaves_out_is_said_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--dry", "--out", str(tmp_path), "--budget-s", "0"]) == 0
    assert {s["status"] for s in report(tmp_path)["sections"]} == {"left out"}
    assert f"left out: {', '.join(NAMES)}" in capsys.readouterr().out


def options(tmp_path: Path, budget_s: float = 60.0) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path, budget_s=budget_s, dtype="bfloat16", seed=1, dry=True, section=None
    )


def test_a_section_that_raises_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(_: Machine, recorder: Recorder, __: argparse.Namespace) -> None:
        recorder.record("so far", 3)
        raise ZeroDivisionError("in the middle")

    def finds(_: Machine, recorder: Recorder, __: argparse.Namespace) -> None:
        recorder.problem("a kernel is wrong")
        recorder.record("behind it", 4)

    def works(_: Machine, recorder: Recorder, __: argparse.Namespace) -> None:
        recorder.record("answer", 5)

    chosen = [
        gpu_check.Section(name, 30, run)
        for name, run in (("breaks", breaks), ("finds", finds), ("works", works))
    ]
    machine = Machine(torch.device("cpu"), torch.bfloat16)
    assert gpu_check.run_all(chosen, machine, options(tmp_path), "command") == 1
    sections = report(tmp_path)["sections"]
    assert [section["status"] for section in sections] == ["failed", "failed", "done"]
    assert sections[0]["data"] == {"so far": 3}
    assert "ZeroDivisionError: in the middle" in sections[0]["error"]
    assert sections[1]["problems"] == ["a kernel is wrong"]
    assert sections[1]["data"] == {"behind it": 4}
    assert sections[2]["data"] == {"answer": 5}
    assert "failed: breaks, finds" in capsys.readouterr().out


def result(tmp_path: Path) -> SectionResult:
    return SectionResult("section", tmp_path / "section.json")


# A section's process as it records something and then ends in one way or another.
RECORDS = """
import json, os, sys, time
path = sys.argv[1]
values = json.load(open(path))
values["data"] = {"so far": 3}
json.dump(values, open(path, "w"))
"""


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("os._exit(3)", "the process ended with exit status 3"),
        ("os.abort()", "the process ended with signal 6"),
        ("time.sleep(60)", "the process ended with signal 9"),
    ],
)
def test_a_process_that_dies_or_hangs_keeps_what_it_had_recorded(
    tmp_path: Path, end: str, error: str
) -> None:
    kept = result(tmp_path)
    said: list[str] = []
    command = [sys.executable, "-c", RECORDS + end, str(kept.path)]
    gpu_check.run_process(command, kept, 5.0 if "sleep" not in end else 1.0, said.append)
    values = json.loads(kept.path.read_text())
    assert (values["status"], values["error"]) == ("failed", error)
    assert values["data"] == {"so far": 3}
    assert said == [f"FAILED: {error}"]


def test_what_a_section_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starts = (
        "import subprocess; child = subprocess.Popen(['sleep', '60']);"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))"
    )
    gpu_check.run_process([sys.executable, "-c", starts], result(tmp_path), 10.0, lambda _: None)
    child = Path(f"/proc/{pid_file.read_text()}/stat")
    end = time.monotonic() + 10
    while _runs(child) and time.monotonic() < end:  # it was told to end, and is about to
        time.sleep(0.05)
    assert not _runs(child)


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_section_in_a_process_of_its_own_gives_the_same_result(tmp_path: Path) -> None:
    (section,) = [s for s in gpu_check.sections() if s.name == "goldens"]
    machine = Machine(torch.device("cpu"), torch.bfloat16)
    # What the child prints is its own; only its part of the report counts.
    kept = os.dup(1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
        try:
            gpu_check.run_apart(section, machine, options(tmp_path), 60.0)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    values = json.loads((tmp_path / "parts" / "goldens.json").read_text())
    assert (values["status"], values["error"]) == ("done", None)
    assert len(values["data"]["files"]) == 10


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("", None),
    ],
)
def test_published_peaks_are_used_for_the_very_device_only(
    device: str, expected: str | None
) -> None:
    found = known_accelerator(device)
    assert (found and found.name) == expected
