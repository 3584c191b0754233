"""How far a segment's cached values lie from those of other texts, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that are compared at a time: fp32 copies of their values in all layers are made.
_CHUNK_TOKENS = 256


def anchor_distance(v: Tensor, source: Tensor, anchors: Tensor) -> Tensor:
    """Squared distances between cached values, summed over layers, heads and channels.

    Values carry no position, so they need no turning before they are compared (KVCOMM,
    arXiv 2510.12872, section 4.2).

    Args:
        v: the cache, [L, S, Hkv, D].
        source: int64 [n] slots of a segment's tokens.
        anchors: int64 [n, A] slots: the token of each anchor that a segment's token is compared
            with; negative where there is none.

    Returns:
        fp32 [n, A]; infinite where there is none.
    """
    distances = torch.full(anchors.shape, torch.inf, device=v.device)
    for start in range(0, source.shape[0], _CHUNK_TOKENS):
        chunk = slice(start, start + _CHUNK_TOKENS)
        values = v.index_select(1, source[chunk]).float()  # [L, chunk, Hkv, D]
        for number in range(anchors.shape[1]):
            slots = anchors[chunk, number]
            others = v.index_select(1, slots.clamp_min(0)).float()
            squares = (values - others).square_().sum(dim=(0, 2, 3))
            distances[chunk, number] = squares.masked_fill_(slots < 0, torch.inf)
    return distances


def anchor_weights(distances: Tensor) -> Tensor:
    """What each anchor weighs for each token; nearer ones weigh more (KVCOMM, Eq. 6).

    The authors take a softmax of minus the distances, whose unit is that of the values: averaged
    over a model's layers they are so small that all anchors weigh about the same, summed so large
    that the nearest weighs everything. Here the nearest anchor's distance is the unit. So anchors
    that are as far share evenly in any model, and one that is much nearer has nearly all.

    Args:
        distances: fp32 [n, A] of `anchor_distance`, squared; in every row one is finite.

    Returns:
        fp32 [n, A]; every row adds up to 1.
    """
    roots = distances.sqrt()
    nearest = roots.amin(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (-roots / nearest).softmax(dim=1)
