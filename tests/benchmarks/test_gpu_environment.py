from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_environment import BUILDS, build_all, check_environment
from gpu_machine import Machine
from gpu_report import Budget, Recorder, SectionResult

# Looks like a GPU to the section; what would use it are the processes it starts.
GPU = Machine(torch.device("cuda", 0), torch.bfloat16)
# Builds what its last argument names: one fails, one never ends.
BUILDER = """
import os, sys, time
name = sys.argv[-1]
print("jobs", os.environ["MAX_JOBS"])
if name.startswith("scattered"):
    sys.exit("error: no such instruction")
if name.startswith("norms"):
    time.sleep(60)
"""


def test_builds_run_side_by_side_and_each_ends_for_itself(tmp_path: Path) -> None:
    result = SectionResult("builds", tmp_path / "builds.json")
    started = time.monotonic()
    recorder = Recorder(result, Budget(4.0), lambda _: None)
    build_all(GPU, recorder, [sys.executable, "-c", BUILDER], tmp_path / "logs")
    assert time.monotonic() - started < 20
    errors = {entry["name"]: entry["error"] for entry in result.data["builds"]}
    assert errors.keys() == BUILDS.keys()
    assert "error: no such instruction" in errors.pop("scattered attention")
    assert errors.pop("norms and activation") == "it was not ready in time"
    assert set(errors.values()) == {None}
    assert len(result.problems) == 2
    log = (tmp_path / "logs" / "build-sampling.txt").read_text()
    assert int(log.split()[1]) >= 2


def test_a_gpu_without_a_compiler_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = SectionResult("environment", tmp_path / "environment.json")
    cpu = Machine(torch.device("cpu"), torch.bfloat16)
    rates = cpu.measured()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Machine, "dry", property(lambda self: self.device.type == "none"))
    monkeypatch.setattr(Machine, "description", lambda _: {"device": "some GPU"})
    monkeypatch.setattr(Machine, "accelerator", lambda _: rates)
    monkeypatch.setattr(Machine, "measured", lambda _: rates)
    check_environment(cpu, Recorder(result, Budget(30), lambda _: None))
    assert result.problems == [
        "there is no nvcc: FlashInfer cannot compile its kernels",
        "there is no ninja: FlashInfer cannot compile its kernels",
    ]
    tools = json.loads(result.path.read_text())["data"]["tools"]
    assert (tools["nvcc"], tools["ninja"]) == (None, None)
