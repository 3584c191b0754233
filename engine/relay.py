"""Carries out relay copies: a recording's KV brought to its place in another prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from relaykv.engine.batch import RelayCopy
from relaykv.engine.kv_cache import KVCache
from relaykv.kernels.rope import cos_sin, rotate_keys


def relay(cache: KVCache, copy: RelayCopy, inv_freq: Tensor) -> None:
    """Copies all layers of K, V, the hidden states and the influence of one segment.

    Keys are stored after RoPE at the position they were computed for. Rotations compose, so one
    rotation by the shift, the same for every token, moves them (RelayCaching, section 4; KVCOMM,
    section 4.3). Values do not depend on the position.

    Args:
        inv_freq: the model's rotary frequencies, fp64 [rotary_dim / 2].
    """
    source = cache.slots(
        copy.source_block_ids, copy.source_start, copy.source_start + copy.num_tokens
    )
    target = cache.slots(copy.block_ids, copy.start, copy.start + copy.num_tokens)
    keys = cache.k.index_select(1, source)  # [layers, n, kv heads, head dim]
    if copy.shift:
        cos, sin = cos_sin(inv_freq, torch.tensor([copy.shift], device=cache.device))
        keys = rotate_keys(keys.flatten(0, 1), cos[0], sin[0]).view_as(keys)
    cache.k.index_copy_(1, target, keys)
    cache.v.index_copy_(1, target, cache.v.index_select(1, source))
    cache.hidden.index_copy_(0, target, cache.hidden.index_select(0, source))
    cache.influence.index_copy_(0, target, cache.influence.index_select(0, source))
