"""Gated activation of the feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [n, 2 * f], the gate's half first.

    Returns:
        [n, f] in the dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
