from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from relaykv.kernels.kernel_set import KernelSet, cuda_kernels, torch_kernels

FIELDS = [field.name for field in dataclasses.fields(KernelSet)]


def test_plain_torch_needs_neither_triton_nor_flashinfer() -> None:
    # torch itself may load triton where it is installed, but not for these.
    program = (
        "import sys, torch; before = {'triton', 'flashinfer'} & set(sys.modules);"
        "from relaykv.kernels.kernel_set import torch_kernels; torch_kernels();"
        "assert {'triton', 'flashinfer'} & set(sys.modules) == before, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_each_kernel_of_plain_torch_has_the_name_of_its_field() -> None:
    kernels = torch_kernels()
    assert [getattr(kernels, name).__name__ for name in FIELDS] == FIELDS


@pytest.mark.usefixtures("triton_installed", "flashinfer_installed")
@pytest.mark.parametrize("name", FIELDS)
def test_each_cuda_kernel_takes_what_its_twin_takes(name: str) -> None:
    fast, twin = getattr(cuda_kernels(), name), getattr(torch_kernels(), name)
    assert list(inspect.signature(fast).parameters) == list(inspect.signature(twin).parameters)
    assert name in fast.__name__
