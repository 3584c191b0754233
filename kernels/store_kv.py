"""Writes fresh keys and values into the cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Puts row i of `k` and `v` into slot `slots[i]`, in place.

    Args:
        k_cache: [S, Hkv, D], one layer's keys.
        v_cache: [S, Hkv, D], one layer's values.
        slots: int64 [n], all different, each in [0, S).
        k: [n, Hkv, D] in the cache's dtype.
        v: [n, Hkv, D] in the cache's dtype.
    """
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
