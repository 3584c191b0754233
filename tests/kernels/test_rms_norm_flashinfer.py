"""The wrapper of FlashInfer's norms, over a stand-in for its kernels: nothing runs on a GPU."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.rms_norm import add_rms_norm, rms_norm
from relaykv.kernels.rms_norm_flashinfer import FlashInferNorms

# Relative; two roundings of 16 bits more or less than in plain torch.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (17, 576), (16, 3, 128)])
def test_the_norm_is_that_of_plain_torch_and_leaves_its_input(
    shape: tuple[int, ...], dtype: torch.dtype, flashinfer_calls: list[str]
) -> None:
    x, weight = torch.randn(shape).to(dtype) * 7, torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    found = FlashInferNorms().rms_norm(x, weight, 1e-5)
    assert torch.equal(x, before)
    expected = rms_norm(x, weight, 1e-5)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-6)
    assert flashinfer_calls == ["rmsnorm"]


def test_heads_may_be_a_slice_of_a_fused_projection(flashinfer_calls: list[str]) -> None:
    fused = torch.randn(5, 9, 64).bfloat16()
    weight = torch.randn(64).bfloat16()
    found = FlashInferNorms().rms_norm(fused[:, 3:6], weight, 1e-6)
    assert found.is_contiguous()
    expected = rms_norm(fused[:, 3:6], weight, 1e-6)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert flashinfer_calls == ["rmsnorm"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_the_sum_and_its_norm_are_written_into_what_was_given_away(
    num_rows: int, dtype: torch.dtype, flashinfer_calls: list[str]
) -> None:
    x, residual = torch.randn(2, num_rows, 576).to(dtype).unbind()
    x, residual = x.clone(), residual.clone()
    weight = torch.randn(576).to(dtype)
    expected_normed, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    normed, total = FlashInferNorms().add_rms_norm(x, residual, weight, 1e-5)
    assert normed.data_ptr() == x.data_ptr()
    assert total.data_ptr() == residual.data_ptr()
    assert torch.equal(total, expected_total)
    # The norm of the sum before it is rounded: small elements of a row keep more digits.
    torch.testing.assert_close(normed, expected_normed, rtol=2 * TOLERANCE[dtype], atol=1e-3)
    assert flashinfer_calls == ["fused_add_rmsnorm"]


def test_no_rows_launch_nothing(flashinfer_calls: list[str]) -> None:
    norms = FlashInferNorms()
    empty, weight = torch.zeros(0, 64).bfloat16(), torch.ones(64).bfloat16()
    assert norms.rms_norm(empty, weight, 1e-6).shape == (0, 64)
    normed, total = norms.add_rms_norm(empty, empty.clone(), weight, 1e-6)
    assert normed.shape == total.shape == (0, 64)
    assert flashinfer_calls == []
