"""Sections of the GPU check: kernels against fp32 references, and golden dumps of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from golden_files import Golden, save_golden
from gpu_machine import SERVED, Machine
from gpu_report import Recorder, table
from kernel_cases import KernelBackend, KernelCase, bounds, errors, evaluate, reference
from kernel_inputs import kernel_cases, large, small, tiny
from torch import Tensor

from relaykv.engine.batch import SamplingRow
from relaykv.engine.request import SamplingParams
from relaykv.engine.sampler import Sampler

_SEEDS = (1, 2)
_MAX_GOLDEN_BYTES = 2 << 20


def check_kernels(machine: Machine, recorder: Recorder, seed: int) -> None:
    """Every kernel against its reference, on inputs that are new in every run."""
    rows: list[tuple[str, ...]] = [("kernel", "attention", "output", "error", "bound")]
    recorder.record("seed", seed)
    work = [
        (f"{backend.name}: {case.name}", (backend, case))
        for offset in _SEEDS
        for case in kernel_cases(tiny() if machine.dry else large(), seed + offset)
        for backend in _backends_for(case, machine)
    ]
    for backend, case in recorder.each(work):
        rows += _compare(machine, recorder, backend, case)
    recorder.say(table(rows))
    recorder.say("errors and bounds in units of the type's spacing, see kernel_cases.py")
    _check_sampling(machine, recorder, seed)


def dump_goldens(machine: Machine, recorder: Recorder, folder: Path) -> None:
    """Small cases with what the device gave, for `tests/kernels/test_goldens.py`."""
    num_bytes = 0
    backend = machine.backends()[SERVED]
    sizes = tiny() if machine.dry else small()
    for case in kernel_cases(sizes, seed=7):
        outputs = evaluate(case, backend, machine.dtype, machine.device)
        origin = {"backend": backend.name, "dry": machine.dry, **machine.description()}
        path = save_golden(folder, Golden(case, machine.dtype, outputs, origin))
        num_bytes += path.stat().st_size
        recorder.append("files", {"name": path.name, "bytes": path.stat().st_size})
    recorder.say(f"{num_bytes / 1024:.0f} KiB of golden files in {folder}")
    if num_bytes > _MAX_GOLDEN_BYTES:
        recorder.problem(f"the golden files take {num_bytes} bytes, more than 2 MiB")


def _backends_for(case: KernelCase, machine: Machine) -> list[KernelBackend]:
    """The variants of attention see attention cases only: the other kernels are the same."""
    backends = machine.backends()
    return backends if case.kind == "attention" else backends[:1]


def _compare(
    machine: Machine, recorder: Recorder, backend: KernelBackend, case: KernelCase
) -> list[tuple[str, ...]]:
    where = f"{case.name}, {backend.name}"
    try:
        found = evaluate(case, backend, machine.dtype, machine.device)
    except Exception as error:
        recorder.problem(f"{where}: {type(error).__name__}: {error}")
        machine.check_alive()
        return []
    wanted = reference(case, machine.dtype, machine.device)
    return _judge(machine.dtype, recorder, (case, backend.name), found, wanted)


def _judge(
    dtype: torch.dtype,
    recorder: Recorder,
    which: tuple[KernelCase, str],
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
) -> list[tuple[str, ...]]:
    case, backend = which
    rows: list[tuple[str, ...]] = []
    allowed = bounds(case)
    for output, error in errors(found, wanted, dtype).items():
        entry: dict[str, Any] = {
            "case": case.name,
            "backend": backend,
            "output": output,
            "error_units": error if math.isfinite(error) else "not a number",
            "bound_units": allowed[output],
        }
        recorder.append("outputs", entry)
        rows.append((case.name, backend, output, f"{error:.3f}", f"{allowed[output]:g}"))
        if not error <= allowed[output]:
            recorder.problem(f"{case.name}, {backend}, {output}: {error:.3g} units off")
    return rows


def _check_sampling(machine: Machine, recorder: Recorder, seed: int) -> None:
    """The same logits must give the same tokens on the device as on the CPU."""
    vocab = 512 if machine.dry else 128256
    settings = [
        SamplingParams(8, temperature=0.0),
        SamplingParams(8, temperature=1.0),
        SamplingParams(8, temperature=0.7, top_k=40),
        SamplingParams(8, temperature=1.2, top_p=0.9),
        SamplingParams(8, temperature=0.9, top_p=0.95, top_k=100, min_p=0.02),
        SamplingParams(8, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5),
    ]
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((8 * len(settings), vocab), generator=generator)
    rows = [
        SamplingRow(settings[i % len(settings)], seed + i, (1, 2, 3), tuple(range(i % 7)), str(i))
        for i in range(len(logits))
    ]
    there = machine.sampler().sample(logits.to(machine.device), rows)
    here = Sampler().sample(logits, rows)
    different = sum(a.token_id != b.token_id for a, b in zip(there, here, strict=True))
    recorder.record("sampling", {"rows": len(rows), "different_tokens": different})
    recorder.say(f"sampling: {different} of {len(rows)} tokens differ from the CPU's")
    if different:
        recorder.problem(f"{different} of {len(rows)} sampled tokens differ from the CPU's")
