"""How far fresh value vectors lie from the cached ones they would replace, token by token."""

from __future__ import annotations

from torch import Tensor


def cosine_deviation(fresh: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """One minus the cosine, mean over KV heads (RelayCaching, Eq. 1).

    Args:
        fresh: values, [n, Hkv, D].
        cache: one layer's values, [S, Hkv, D].
        slots: int64 [n], where in `cache` the values lie that row i of `fresh` is held against.

    Returns:
        fp32 [n]; 0 where both point the same way in every head.
    """
    a, b = fresh.float(), cache.index_select(0, slots).float()
    dots = (a * b).sum(dim=-1)
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    deviation: Tensor = (1.0 - dots / norms.clamp_min(1e-12)).mean(dim=-1)
    return deviation


def squared_deviation(fresh: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Sum of squared differences over heads and dimensions (CacheBlend, section 4.2).

    Args:
        fresh: values, [n, Hkv, D].
        cache: one layer's values, [S, Hkv, D].
        slots: int64 [n], where in `cache` the values lie that row i of `fresh` is held against.

    Returns:
        fp32 [n].
    """
    return (fresh.float() - cache.index_select(0, slots).float()).square().sum(dim=(1, 2))
