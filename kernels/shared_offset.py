"""Corrects relayed keys or values by what recomputed tokens of the same segment deviate."""

from __future__ import annotations

from torch import Tensor


def add_shared_offset(
    cache: Tensor, fresh: Tensor, fresh_slots: Tensor, other_slots: Tensor, scale: float
) -> None:
    """Adds the mean deviation of some tokens of a segment to its other tokens, in place.

    What a new context does to a segment's KV is for a large part the same for all its tokens
    (AgentKVShift, arXiv 2607.21604: a shared offset and small token noise), so tokens that are
    computed again anyway tell what the others lack.

    Args:
        cache: one layer's keys or values, [S, Hkv, D]; holds the relayed ones of all tokens.
        fresh: [n, Hkv, D], computed anew, of the tokens in `fresh_slots`.
        fresh_slots: int64 [n].
        other_slots: int64 [m], all different, none of them among `fresh_slots`.
        scale: what the mean is multiplied with.
    """
    relayed = cache.index_select(0, fresh_slots)
    offset = (fresh.float() - relayed.float()).mean(dim=0) * scale  # [Hkv, D]
    corrected = cache.index_select(0, other_slots).float() + offset
    cache.index_copy_(0, other_slots, corrected.to(cache.dtype))
