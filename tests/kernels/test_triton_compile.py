"""Compiles the Triton kernels for NVIDIA devices, without one.

This shows that they compile, hold in shared memory and keep to their registers; nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory that one program may use, by compute capability.
MAX_SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# Of 65,536 a multiprocessor has: with 128 threads a program, four programs fit at least.
MAX_REGISTERS = 128


@pytest.mark.usefixtures("triton_installed")
def test_every_kernel_compiles_for_every_device_within_its_memory(tmp_path: Path) -> None:
    program = Path(__file__).parent / "compile_triton.py"
    result = subprocess.run(
        [sys.executable, "-W", "error", str(program), *map(str, MAX_SHARED_BYTES)],
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "TRITON_CACHE_DIR": str(tmp_path),
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    for one in compiled:
        assert one["shared_bytes"] <= MAX_SHARED_BYTES[one["capability"]], one
        assert one["spill_bytes"] == 0, one
        assert 0 < one["num_registers"] <= MAX_REGISTERS, one
    # store, two deviations, two parts of a shift copy, an offset, distances, anchors' keys and
    # values, influence; in two shapes, in the odd one also keys' ends; two types
    assert len(compiled) == (2 * 10 + 1) * 2 * len(MAX_SHARED_BYTES)
    kernels = Path(__file__).parents[2] / "kernels"
    sources = "".join(path.read_text(encoding="utf-8") for path in kernels.glob("*_triton.py"))
    assert len({one["kernel"] for one in compiled}) == sources.count("@triton.jit")
