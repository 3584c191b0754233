"""Golden files: what kernels gave on a real device, kept so that any machine can compare.

One compressed npz per case: its inputs, the outputs, and where they come from as JSON. Values of
16-bit types are stored as fp16; inputs fit it exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_cases import KernelBackend, KernelCase, bounds, errors, evaluate, reference
from torch import Tensor

_SCHEMA = 1
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Golden:
    """A case with the outputs that `origin` names the source of."""

    case: KernelCase
    dtype: torch.dtype  # that the kernels ran in
    outputs: Mapping[str, Tensor]
    origin: Mapping[str, Any]  # device, backend, commit, versions


def save_golden(folder: Path, golden: Golden) -> Path:
    """Writes the file and returns its path."""
    case = golden.case
    meta = {
        "schema": _SCHEMA,
        "name": case.name,
        "kind": case.kind,
        "wide": case.wide,
        "numbers": case.numbers,
        "dtype": str(golden.dtype).removeprefix("torch."),
        "origin": golden.origin,
    }
    arrays = {f"in.{name}": _array(value, name in case.wide) for name, value in case.inputs.items()}
    for name, value in golden.outputs.items():
        arrays[f"out.{name}"] = _array(value, value.dtype == torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name.replace(', ', '-').replace(' ', '-')}-{meta['dtype']}.npz"
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)
    return path


def load_golden(path: Path) -> Golden:
    """Reads a golden file.

    Raises:
        ValueError: the file is of another schema.
    """
    with np.load(path) as archive:
        meta = json.loads(str(archive["meta"]))
        if meta["schema"] != _SCHEMA:
            raise ValueError(f"{path.name} has schema {meta['schema']}, not {_SCHEMA}")
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for key in archive.files:
            side, _, name = key.partition(".")
            if side in ("in", "out"):
                value = torch.from_numpy(archive[key])
                (inputs if side == "in" else outputs)[name] = (
                    value.float() if value.is_floating_point() else value
                )
    case = KernelCase(
        meta["name"], meta["kind"], inputs, tuple(meta["wide"]), tuple(meta["numbers"])
    )
    return Golden(case, _DTYPES[meta["dtype"]], outputs, meta["origin"])


def golden_problems(golden: Golden, backend: KernelBackend) -> list[str]:
    """Where the recorded outputs, or those of a backend on the CPU, are too far off.

    The recorded outputs must lie within the case's bounds of the fp32 reference, and the
    backend's within twice those of the recorded ones.
    """
    cpu = torch.device("cpu")
    wanted = reference(golden.case, golden.dtype, cpu)
    found = evaluate(golden.case, backend, golden.dtype, cpu)
    recorded = errors(golden.outputs, wanted, golden.dtype)
    between = errors(found, golden.outputs, golden.dtype)
    problems = []
    for name, bound in bounds(golden.case).items():
        if not recorded[name] <= bound:
            problems.append(f"recorded {name}: {recorded[name]:.3g} units from fp32")
        if not between[name] <= 2 * bound:
            problems.append(f"{name}: {between[name]:.3g} units from what was recorded")
    return problems


def _array(value: Tensor, wide: bool) -> Any:
    if value.is_floating_point() and not wide:
        return value.to(torch.float16).numpy()
    return value.numpy()
