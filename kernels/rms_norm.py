"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides each vector by its root mean square, computed in fp32, and scales it.

    Args:
        x: [..., d], fp32 or bf16.
        weight: [d], the dtype of `x`.
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Llama casts back before it multiplies with the weight; in bf16 the order is visible.
    return weight * scaled.to(x.dtype)
