"""Stores how computed KV differs from the KV recorded of the same tokens, as cached tokens."""

from __future__ import annotations

from torch import Tensor

from relaykv.kernels.segment_offset import token_offsets


def store_offset(
    k: Tensor,
    v: Tensor,
    source: Tensor,
    target: Tensor,
    place: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Puts what slot `target[i]` has more than slot `source[i]` into slot `place[i]`.

    Keys are turned back to a segment that starts at position 0, so that the offsets mean the same
    wherever a segment stands; the authors' code leaves them in the frame of their own prompt. The
    arithmetic is fp32 and cast once.

    Args:
        k, v: the cache, [L, S, Hkv, D].
        source: int64 [n] slots of the tokens as recorded.
        target: int64 [n] slots of the same tokens as computed in their new place.
        place: int64 [n] slots, all different, none of them among the others.
        cos, sin: fp32 [2, r / 2], of minus the position of the first token in the recording, and
            of minus its position now.
    """
    for part, (keys, values) in token_offsets(k, v, source, target, cos, sin):
        k.index_copy_(1, place[part], keys.to(k.dtype))
        v.index_copy_(1, place[part], values.to(v.dtype))
