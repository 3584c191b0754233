"""Sections of the GPU check: what the machine has, and building what is compiled at first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_machine import CUDA_CORE_DECODE, SERVED, Machine, output_of
from gpu_report import Recorder, table
from kernel_cases import evaluate
from kernel_inputs import kernel_cases, small, tiny

from relaykv.engine.batch import SamplingRow
from relaykv.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Build:
    """What compiles at first use, by the cases that use it."""

    cases: tuple[str, ...]
    backend: int = SERVED  # of `Machine.backends`
    sampling: bool = False  # a draw with top-k


# Each attention module takes minutes of compiler time, so each has a process of its own.
BUILDS: Mapping[str, Build] = {
    "causal attention": Build(("dense attention", "decode attention")),
    "scattered attention": Build(("scattered attention",)),
    "decode without tensor cores": Build(("decode attention",), CUDA_CORE_DECODE),
    "norms and activation": Build(("norms, activation, rope",)),
    "Triton kernels": Build(("shift copy", "deviation", "store KV")),
    "sampling": Build((), sampling=True),
}


def check_environment(machine: Machine, recorder: Recorder) -> None:
    """Versions, tools and the rates that the device reaches in plain torch."""
    description = machine.description()
    recorder.record("machine", description)
    tools = {
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": (output_of("nvcc", "--version") or "").split("\n")[-2:][0] or None,
        "ninja": shutil.which("ninja"),
        "CUDA_HOME": os.environ.get("CUDA_HOME"),
    }
    tools = {name: value and _base(value) for name, value in tools.items()}
    recorder.record("tools", tools)
    for name, value in {**description, **tools}.items():
        recorder.say(f"{name}: {value}")
    if not machine.dry and tools["nvcc"] is None:
        recorder.problem("there is no nvcc: FlashInfer cannot compile its kernels")
    if not machine.dry and tools["ninja"] is None:
        recorder.problem("there is no ninja: FlashInfer cannot compile its kernels")
    published, measured = machine.accelerator(), machine.measured()
    recorder.record("peaks", {"used_for_floors": asdict(published), "reached": asdict(measured)})
    for rates in (published, measured):
        recorder.say(
            f"peaks, {rates.name}: {rates.operations_per_s / 1e12:.2f} TFLOP/s, "
            f"{rates.bytes_per_s / 1e12:.2f} TB/s"
        )


def build_all(machine: Machine, recorder: Recorder, command: Sequence[str], logs: Path) -> None:
    """Uses everything once, each in a process of its own, all at the same time.

    Args:
        command: starts a process that builds what its last argument names.
        logs: folder for what the processes print.
    """
    if machine.dry:
        for name in recorder.each((name, name) for name in BUILDS):
            _note(recorder, name, use_once(machine, name), None)
        return
    # Each compiler run is one process; the modules share the cores.
    jobs = max(2, len(os.sched_getaffinity(0)) // 3)
    environment = {**os.environ, "MAX_JOBS": str(jobs)}
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name in BUILDS:
        with _log(logs, name).open("wb") as log:
            running[name] = subprocess.Popen(
                [*command, name], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
    try:
        while running and recorder.budget.left_s > 0:
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                error = _log(logs, name).read_text(errors="replace")[-4000:] if code else None
                _note(recorder, name, time.monotonic() - started, error)
        for name in running:
            _note(recorder, name, time.monotonic() - started, "it was not ready in time")
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def use_once(machine: Machine, build: str) -> float:
    """Seconds until everything that a build stands for has been used."""
    started = time.monotonic()
    what = BUILDS[build]
    backend = machine.backends()[what.backend]
    for case in kernel_cases(tiny() if machine.dry else small(), seed=3):
        if case.name in what.cases:
            evaluate(case, backend, machine.dtype, machine.device)
    if what.sampling:
        row = SamplingRow(SamplingParams(1, top_k=5), 1, (), ())
        machine.sampler().sample(torch.randn((1, 512), device=machine.device), [row])
    machine.wait()
    return time.monotonic() - started


def _note(recorder: Recorder, name: str, seconds: float, error: str | None) -> None:
    recorder.append("builds", {"name": name, "seconds": round(seconds, 2), "error": error})
    recorder.say(table([(name, f"ready after {seconds:.1f} s" if error is None else "NOT BUILT")]))
    if error is not None:
        recorder.problem(f"{name}: {error}")


def _log(logs: Path, name: str) -> Path:
    return logs / f"build-{name.replace(' ', '-')}.txt"


def _base(value: str) -> str:
    """A tool's name without its folder, which says nothing elsewhere."""
    return Path(value).name if value.startswith(os.sep) else value


BUILD_COMMAND = (sys.executable, str(Path(__file__).with_name("gpu_check.py")), "--build")
