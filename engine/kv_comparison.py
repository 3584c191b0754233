"""Compares the KV of the same tokens at two places of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.kv_cache import KVCache
from relaykv.engine.layer_curves import FloatArray
from relaykv.kernels.deviation import cosine_deviation
from relaykv.kernels.rope import cos_sin, rotate_keys


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """One minus the cosine, mean over KV heads, [layers, tokens] each."""

    values: FloatArray
    keys: FloatArray


@torch.inference_mode()
def kv_deviation(
    cache: KVCache, relayed: Tensor, computed: Tensor, shift: int, inv_freq: Tensor
) -> KVDeviation:
    """How far recorded KV, brought to another position, lies from KV computed there.

    Layer by layer, so that no more than one layer's KV of the tokens is copied at a time.

    Args:
        relayed: int64 [n], the recorded tokens' slots.
        computed: int64 [n], the slots of the same tokens where they were computed again.
        shift: new position minus old position.
        inv_freq: the model's rotary frequencies, fp64 [rotary_dim / 2].
    """
    cos, sin = cos_sin(inv_freq, torch.tensor([shift], device=inv_freq.device))
    cos, sin = cos[0].to(cache.device), sin[0].to(cache.device)
    in_order = torch.arange(relayed.numel(), device=cache.device)
    values, keys = [], []
    for k, v in zip(cache.k, cache.v, strict=True):  # [slots, kv heads, head dim]
        values.append(cosine_deviation(v.index_select(0, computed), v, relayed))
        moved = rotate_keys(k.index_select(0, relayed), cos, sin)
        keys.append(cosine_deviation(k.index_select(0, computed), moved, in_order))
    return KVDeviation(_array(values), _array(keys))


def _array(rows: list[Tensor]) -> FloatArray:
    return torch.stack(rows).cpu().numpy().astype(np.float64)
