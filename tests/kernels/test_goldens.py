"""Plain torch against what kernels gave on a GPU, where such files have been recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import Golden, golden_problems, load_golden, save_golden
from gpu_machine import torch_attention
from kernel_cases import KernelBackend, KernelCase, evaluate
from kernel_inputs import kernel_cases, small, tiny

from relaykv.kernels.kernel_set import torch_kernels

CPU = torch.device("cpu")
TORCH = KernelBackend("torch", torch_kernels(), torch_attention)
# As benchmarks/gpu_check.py writes them on a GPU. None have been recorded yet.
RECORDED = sorted((Path(__file__).parent / "goldens").glob("*.npz"))


def made_here(case: KernelCase, dtype: torch.dtype) -> Golden:
    """A golden of plain torch on this machine: it shows that the format keeps what it is given."""
    return Golden(case, dtype, evaluate(case, TORCH, dtype, CPU), {"backend": "torch", "dry": True})


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_plain_torch_agrees_with_what_a_gpu_computed(path: Path) -> None:
    golden = load_golden(path)
    assert not golden.origin["dry"], f"{path.name} was not recorded on a GPU"
    assert golden_problems(golden, TORCH) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", kernel_cases(tiny(), 7), ids=lambda case: case.name)
def test_a_file_gives_back_the_case_bit_for_bit_and_the_outputs_almost(
    tmp_path: Path, case: KernelCase, dtype: torch.dtype
) -> None:
    golden = made_here(case, dtype)
    loaded = load_golden(save_golden(tmp_path, golden))
    assert (loaded.case.name, loaded.case.kind) == (case.name, case.kind)
    assert (loaded.case.wide, loaded.case.numbers) == (case.wide, case.numbers)
    assert (loaded.dtype, loaded.origin) == (dtype, golden.origin)
    assert loaded.case.inputs.keys() == case.inputs.keys()
    for name, value in case.inputs.items():
        torch.testing.assert_close(
            loaded.case.inputs[name], value, rtol=0, atol=0, equal_nan=True, msg=name
        )
    assert golden_problems(loaded, TORCH) == []


def test_an_output_that_no_longer_agrees_is_named(tmp_path: Path) -> None:
    case = next(case for case in kernel_cases(tiny(), 7) if case.name == "scattered attention")
    golden = made_here(case, torch.bfloat16)
    out = golden.outputs["out"].clone()
    out[5] = -out[5]
    wrong = replace(golden, outputs={**golden.outputs, "out": out})
    problems = golden_problems(load_golden(save_golden(tmp_path, wrong)), TORCH)
    assert [problem.split(":")[0] for problem in problems] == ["recorded out", "out"]


def test_all_files_together_stay_below_two_mebibytes(tmp_path: Path) -> None:
    paths = [save_golden(tmp_path, made_here(c, torch.bfloat16)) for c in kernel_cases(small(), 7)]
    assert len(set(paths)) == len(paths)
    assert sum(path.stat().st_size for path in paths) < 2 << 20
    assert sum(path.stat().st_size for path in RECORDED) < 2 << 20


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.npz"
    np.savez_compressed(path, meta=np.array('{"schema": 0}'))
    with pytest.raises(ValueError, match=r"old\.npz has schema 0, not 1"):
        load_golden(path)
