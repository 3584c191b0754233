"""What tests of the CUDA kernels share: whether the libraries these need are there.

The GPU check's cases and golden files are read from benchmarks/, which is put on the path.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def triton_installed() -> None:
    """Skips the test where Triton is missing."""
    _skip_without("triton")


@pytest.fixture
def flashinfer_installed() -> None:
    """Skips the test where FlashInfer is missing."""
    _skip_without("flashinfer")


@pytest.fixture
def flashinfer_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of FlashInfer's elementwise functions called so far; a stand-in takes the calls."""
    _skip_without("flashinfer")
    from flashinfer_calls import FlashInferCalls

    calls = FlashInferCalls()
    calls.install(monkeypatch)
    return calls.names


def _skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make setup-kernels")
