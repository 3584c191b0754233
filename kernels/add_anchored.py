"""Adds a weighted sum of anchors' offsets to a segment's cached keys and values, per token."""

from __future__ import annotations

from torch import Tensor

from relaykv.kernels.rope import apply_rope


def add_anchored(
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    weights: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Adds what `weights[i]` makes of the slots `offsets[i]` to slot `target[i]`, in place.

    The offsets of a token stand in the cache itself, in a slot of their own, in every layer: of its
    key, as in a segment that starts at position 0, and of its value (`store_offset.py`). One
    weight per token and anchor serves all layers, heads and channels (KVCOMM, arXiv 2510.12872,
    Eqs. 6 and 7). The arithmetic is fp32 and cast once.

    Args:
        k, v: the cache, [L, S, Hkv, D].
        offsets: int64 [n, A] slots; a negative one counts for nothing.
        weights: fp32 [n, A].
        target: int64 [n] slots, all different, none of them among `offsets`.
        segment: int64 [n], the row of `cos` and `sin` that holds where a token's segment starts.
        cos, sin: fp32 [segments, r / 2], of the angles of the segments' starts, r <= D.
    """
    num_layers, _, *row = k.shape
    for cache, is_key in ((k, True), (v, False)):
        total = cache.new_zeros((num_layers, target.shape[0], *row)).float()  # [L, n, Hkv, D]
        for number in range(offsets.shape[1]):
            slots = offsets[:, number]
            weight = weights[:, number].masked_fill(slots < 0, 0.0)[:, None, None]
            total += weight * cache.index_select(1, slots.clamp_min(0)).float()
        if is_key:
            total = apply_rope(total, cos.index_select(0, segment), sin.index_select(0, segment))
        added = cache.index_select(1, target).float() + total
        cache.index_copy_(1, target, added.to(cache.dtype))
