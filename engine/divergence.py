"""How far one next-token distribution is from another."""

from __future__ import annotations

from torch import Tensor


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of `other` from `reference`, in nats.

    Args:
        reference, other: log-probabilities, fp32 [positions, vocab].

    Returns:
        fp32 [positions]; rounding below zero is taken off.
    """
    return (reference.exp() * (reference - other)).sum(dim=-1).clamp_min(0.0)
