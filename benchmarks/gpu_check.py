"""The first hour on a GPU as one script: builds, kernels, the engine, and speed over floors.

    python benchmarks/gpu_check.py --out benchmarks/out/gpu_check
    python benchmarks/gpu_check.py --dry --out benchmarks/out/gpu_check

Sections run in the order of their worth, each in a process of its own, so that one which fails
or hangs takes nothing with it; `--budget-s` ends the check in order and says what was left out.
`gpu_check.json` in the output folder is complete after every section. Needs no network: models
have random weights of the public shapes. A dry run does all of it at toy sizes on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_engines import check_engines
from gpu_environment import BUILD_COMMAND, BUILDS, build_all, check_environment, use_once
from gpu_kernels import check_kernels, dump_goldens
from gpu_machine import Machine, commit
from gpu_report import SCHEMA, Budget, Recorder, SectionResult, printer, run_guarded, write_json
from gpu_scattered import measure_scattered
from gpu_speed import measure_rates
from gpu_ttft import measure_ttft
from model_shapes import llama_8b, qwen3_06b, toy_llama, toy_qwen3
from paper_setups import kvcomm, relaycaching, toy

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# What a process may take to start, and to end once its time is up.
_GRACE_S = 30.0
_DEFAULT_OUT = Path(__file__).parent / "out" / "gpu_check"


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the check."""

    name: str
    budget_s: float  # it stops between two measurements when this is over
    run: Callable[[Machine, Recorder, argparse.Namespace], None]


def sections() -> tuple[Section, ...]:
    """In the order of their worth; the budgets are for an H200 with 16 cores."""
    return (
        Section("environment", 30, lambda m, r, _: check_environment(m, r)),
        Section("builds", 240, lambda m, r, o: build_all(m, r, _build_command(o), o.out / "logs")),
        Section("kernels", 60, lambda m, r, o: check_kernels(m, r, o.seed)),
        Section("goldens", 30, lambda m, r, o: dump_goldens(m, r, o.out / "goldens")),
        Section("engines", 100, lambda m, r, _: check_engines(m, r)),
        Section("ttft relaycaching", 80, _ttft_relaycaching),
        Section("ttft kvcomm", 80, _ttft_kvcomm),
        Section("scattered attention", 40, _scattered),
        Section("rates Llama-3.1-8B", 60, _rates_llama),
        Section("rates Qwen3-0.6B", 40, _rates_qwen3),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check: 0 when no section failed, 1 when one did, 2 when there is no GPU."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here; --dry runs on a CPU", file=sys.stderr)
        return 2
    machine = _machine(options)
    if options.build is not None:
        print(f"{use_once(machine, options.build):.1f} s")
        return 0
    chosen = [s for s in sections() if options.section in (None, s.name)]
    if options.part:
        (section,) = chosen
        result = run_here(section, machine, options, options.budget_s)
        return int(result.status == "failed")
    command = shlex.join(["python", "benchmarks/gpu_check.py", *arguments])
    return run_all(chosen, machine, options, command)


def run_all(
    chosen: Sequence[Section], machine: Machine, options: argparse.Namespace, command: str
) -> int:
    """Runs sections one after another and keeps the report up to date."""
    say = printer(machine.dry)
    end = time.monotonic() + options.budget_s
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "dry": machine.dry,
        "note": "a dry run on a CPU: nothing ran on a GPU" if machine.dry else "",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command,
        "machine": machine.description(),
        "sections": [],
    }
    for section in chosen:
        left = end - time.monotonic()
        say(f"== {section.name}")
        if left < min(10.0, section.budget_s):
            result = _part(options, section)
            result.status = "left out"
            result.save()
        else:
            run = run_here if machine.dry else run_apart
            run(section, machine, options, min(section.budget_s, left))
        report["sections"].append(json.loads(_part(options, section).path.read_text()))
        write_json(options.out / "gpu_check.json", report)
        say(f"-- {section.name}: {report['sections'][-1]['status']}\n")
    by_status = {
        status: [s["name"] for s in report["sections"] if s["status"] == status]
        for status in ("failed", "left out", "done")
    }
    for status, names in by_status.items():
        say(f"{status}: {', '.join(names) or 'none'}")
    say(f"written: {options.out / 'gpu_check.json'}")
    return int(bool(by_status["failed"]))


def run_here(
    section: Section, machine: Machine, options: argparse.Namespace, budget_s: float
) -> SectionResult:
    """Runs a section in this process."""
    result = _part(options, section)
    budget = Budget(budget_s)
    say = printer(machine.dry)
    run_guarded(result, budget, say, lambda recorder: section.run(machine, recorder, options))
    return result


def run_apart(
    section: Section, machine: Machine, options: argparse.Namespace, budget_s: float
) -> None:
    """Runs a section in a process of its own, which is ended when it does not end by itself."""
    command = [*_self(options), "--section", section.name, "--budget-s", str(budget_s), "--part"]
    run_process(command, _part(options, section), budget_s + _GRACE_S, printer(machine.dry))


def run_process(
    command: Sequence[str], result: SectionResult, limit_s: float, say: Callable[[str], None]
) -> None:
    """Runs a section's process; what it recorded stays, whatever becomes of it."""
    result.save()
    started = time.monotonic()
    # With a session of its own, so that compilers which it started end with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    values = json.loads(result.path.read_text())
    if values["status"] == "running":  # it never came to its end
        name = f"signal {-code}" if code < 0 else f"exit status {code}"
        values["status"], values["error"] = "failed", f"the process ended with {name}"
        values["seconds"] = round(time.monotonic() - started, 2)
        write_json(result.path, values)
        say(f"FAILED: {values['error']}")


def _ttft_relaycaching(machine: Machine, recorder: Recorder, _: argparse.Namespace) -> None:
    setup = toy(relaycaching()) if machine.dry else relaycaching()
    shape = toy_qwen3() if machine.dry else qwen3_06b()
    measure_ttft(machine, recorder, setup, shape, machine.accelerator(), _repeats(machine))


def _ttft_kvcomm(machine: Machine, recorder: Recorder, _: argparse.Namespace) -> None:
    setup = toy(kvcomm()) if machine.dry else kvcomm()
    shape = toy_llama() if machine.dry else llama_8b()
    measure_ttft(machine, recorder, setup, shape, machine.accelerator(), _repeats(machine))


def _repeats(machine: Machine) -> int:
    return 1 if machine.dry else 5


def _rates_llama(machine: Machine, recorder: Recorder, _: argparse.Namespace) -> None:
    shape = toy_llama() if machine.dry else llama_8b()
    measure_rates(machine, recorder, shape, machine.accelerator())


def _rates_qwen3(machine: Machine, recorder: Recorder, _: argparse.Namespace) -> None:
    shape = toy_qwen3() if machine.dry else qwen3_06b()
    measure_rates(machine, recorder, shape, machine.accelerator())


def _scattered(machine: Machine, recorder: Recorder, _: argparse.Namespace) -> None:
    shapes = [toy_llama()] if machine.dry else [llama_8b(), qwen3_06b()]
    measure_scattered(machine, recorder, shapes)


def _machine(options: argparse.Namespace) -> Machine:
    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    return Machine(device, _DTYPES[options.dtype])


def _part(options: argparse.Namespace, section: Section) -> SectionResult:
    path = options.out / "parts" / f"{section.name.replace(' ', '-')}.json"
    return SectionResult(section.name, path)


def _self(options: argparse.Namespace) -> list[str]:
    """The command of a process that does part of this check."""
    return [
        *BUILD_COMMAND[:2], "--out", str(options.out), "--dtype", options.dtype,
        "--seed", str(options.seed), *(["--dry"] if options.dry else []),
    ]  # fmt: skip


def _build_command(options: argparse.Namespace) -> list[str]:
    return [*_self(options), "--build"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_check.py",
        description="Builds, checks and measures everything that only a GPU can show.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = [section.name for section in sections()]
    add = parser.add_argument
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder for results and golden files")
    add("--budget-s", type=float, default=720.0, help="seconds for all of it")
    add("--section", choices=names, help="run this one only")
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of weights and KV cache")
    add("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the kernels' inputs")
    add("--dry", action="store_true", help="toy sizes on a CPU; nothing runs on a GPU")
    add("--build", choices=tuple(BUILDS), help=argparse.SUPPRESS)
    add("--part", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
