from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from relaykv.kernels.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (17, 576), (3, 4, 64)])
def test_it_gives_the_bits_of_llamas_own_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 7
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    assert torch.equal(rms_norm(x, norm.weight.detach(), 1e-5), norm(x).detach())


def test_a_zero_vector_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_first_gives_the_bits_of_two_steps(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 17, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
