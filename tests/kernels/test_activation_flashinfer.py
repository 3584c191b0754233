"""The wrapper of FlashInfer's activation, over a stand-in for its kernel: nothing runs on a GPU."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.activation import silu_and_mul
from relaykv.kernels.activation_flashinfer import load_silu_and_mul


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_it_is_that_of_plain_torch_for_dense_rows_and_others(
    num_rows: int, dtype: torch.dtype, tolerance: float, flashinfer_calls: list[str]
) -> None:
    silu_and_mul_flashinfer = load_silu_and_mul()
    wide = torch.randn(num_rows, 200).to(dtype)
    for gate_up in (wide, wide[:, :128]):
        found = silu_and_mul_flashinfer(gate_up)
        assert found.dtype is dtype
        torch.testing.assert_close(found, silu_and_mul(gate_up), rtol=tolerance, atol=1e-6)
    assert flashinfer_calls == ["silu_and_mul"] * 2


def test_no_rows_launch_nothing(flashinfer_calls: list[str]) -> None:
    assert load_silu_and_mul()(torch.zeros(0, 64).bfloat16()).shape == (0, 32)
    assert flashinfer_calls == []
