"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides each vector by its root mean square, computed in fp32, and scales it.

    Args:
        x: [..., d], fp32, bf16 or fp16.
        weight: [d], the dtype of `x`.
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Llama casts back before it multiplies with the weight; in bf16 the order is visible.
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the residual stream and normalises the sum.

    The caller gives both tensors away: a fused version writes its two results into them, so only
    what is returned may be used afterwards.

    Args:
        x: [n, d], fp32, bf16 or fp16.
        residual: [n, d], the dtype of `x`, other memory than `x`.
        weight: [d], the dtype of `x`.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum itself, each [n, d] in the dtype of `x`.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
