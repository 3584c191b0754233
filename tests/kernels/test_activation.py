from __future__ import annotations

import torch

from relaykv.kernels.activation import silu_and_mul


def test_the_first_half_gates_the_second() -> None:
    gate_up = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    gate, up = gate_up[:, :6], gate_up[:, 6:]
    torch.testing.assert_close(silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_bf16_stays_bf16() -> None:
    assert silu_and_mul(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
