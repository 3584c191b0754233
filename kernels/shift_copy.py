"""Copies cached tokens to other slots, their keys rotated to the positions they now stand at."""

from __future__ import annotations

from torch import Tensor

from relaykv.kernels.rope import apply_rope


def shift_copy(
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    influence: Tensor,
    source: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Copies slot `source[i]` to slot `target[i]` in every layer, in place.

    Keys are cached after RoPE at the position they were computed for. Rotations compose, so one
    rotation by the shift, the same for all tokens of a segment, moves them (RelayCaching,
    section 4; KVCOMM, section 4.3). It is done in fp32 and cast once. Values, hidden states and
    influence do not depend on the position.

    Args:
        k, v: the cache, [L, S, Hkv, D].
        hidden: [S, d].
        influence: fp32 [S].
        source: int64 [n] slots; one may occur several times.
        target: int64 [n] slots, all different. No slot is both a source and a target: copies run
            in any order.
        segment: int64 [n], the row of `cos` and `sin` that holds a token's shift.
        cos, sin: fp32 [segments, r / 2], of the shifts' angles, r <= D. Best computed in fp64
            (`rope.cos_sin`). Dimensions from r on are copied.
    """
    keys = k.index_select(1, source)  # [L, n, Hkv, D]
    rotated = apply_rope(keys, cos.index_select(0, segment), sin.index_select(0, segment))
    k.index_copy_(1, target, rotated)
    v.index_copy_(1, target, v.index_select(1, source))
    hidden.index_copy_(0, target, hidden.index_select(0, source))
    influence.index_copy_(0, target, influence.index_select(0, source))
