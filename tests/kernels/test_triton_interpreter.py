"""Runs the Triton kernels on the CPU, in Triton's interpreter, against their torch twins.

`TRITON_INTERPRET` is read when a kernel is defined, so the cases run in a process of their own. The
interpreter truncates bf16 instead of rounding it, so they are in fp32 and fp16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
KERNELS = sorted(path.stem for path in (FOLDER.parents[1] / "kernels").glob("*_triton.py"))
CASES = [f"{name.removesuffix('_triton')}_cases.py" for name in KERNELS]


def test_every_triton_kernel_has_cases() -> None:
    assert CASES
    assert [name for name in CASES if not (FOLDER / name).exists()] == []


@pytest.mark.usefixtures("triton_installed")
def test_the_kernels_agree_with_their_twins_in_the_interpreter(tmp_path: Path) -> None:
    # The options are for the outer run: a cache folder is an unknown option without its plugin.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES],
        cwd=FOLDER,
        env={**env, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = re.search(r"^(\d+) passed in ", result.stdout, re.MULTILINE)
    assert counts, f"not all of the cases ran:\n{result.stdout}"
