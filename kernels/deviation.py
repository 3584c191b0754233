"""How far fresh value vectors lie from the ones they would replace, token by token."""

from __future__ import annotations

from torch import Tensor


def cosine_deviation(fresh: Tensor, relayed: Tensor) -> Tensor:
    """One minus the cosine, mean over KV heads (RelayCaching, Eq. 1).

    Args:
        fresh, relayed: values, [n, kv heads, head dim].

    Returns:
        fp32 [n]; 0 where both point the same way in every head.
    """
    a, b = fresh.float(), relayed.float()
    dots = (a * b).sum(dim=-1)
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    deviation: Tensor = (1.0 - dots / norms.clamp_min(1e-12)).mean(dim=-1)
    return deviation


def squared_deviation(fresh: Tensor, relayed: Tensor) -> Tensor:
    """Sum of squared differences over heads and dimensions (CacheBlend, section 4.2).

    Args:
        fresh, relayed: values, [n, kv heads, head dim].

    Returns:
        fp32 [n].
    """
    return (fresh.float() - relayed.float()).square().sum(dim=(1, 2))
