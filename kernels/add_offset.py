"""Adds an offset that is the same for all tokens of a segment to their cached keys and values."""

from __future__ import annotations

from torch import Tensor

from relaykv.kernels.rope import apply_rope


def add_offset(
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    index: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
) -> None:
    """Adds `scale * offsets[index[segment[i]]]` to slot `target[i]` in every layer, in place.

    Offsets of keys are those at a segment's start, position 0, and are rotated to where the
    segment starts. The arithmetic is fp32 and cast once.

    Args:
        k, v: the cache, [L, S, Hkv, D].
        offsets: fp32 [N, 2, L, Hkv, D], of keys and of values.
        index: int64 [segments], which of them a segment is given.
        target: int64 [n] slots, all different.
        segment: int64 [n], the segment of a token.
        cos, sin: fp32 [segments, r / 2], of the angles of the segments' starts, r <= D.
        scale: how much of the offsets is added.
    """
    chosen = scale * offsets.index_select(0, index)  # [segments, 2, L, Hkv, D]
    key_offsets = chosen[:, 0].transpose(0, 1)  # [L, segments, Hkv, D]
    for cache, offset in (
        (k, apply_rope(key_offsets, cos, sin)),
        (v, chosen[:, 1].transpose(0, 1)),
    ):
        added = cache.index_select(1, target).float() + offset.index_select(1, segment)
        cache.index_copy_(1, target, added.to(cache.dtype))
