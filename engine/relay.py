"""Carries out relay copies: recordings' KV brought to its place in other prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relaykv.engine.batch import RelayCopy
from relaykv.engine.kv_cache import KVCache
from relaykv.kernels.attention import IntArray
from relaykv.kernels.kernel_set import ShiftCopy
from relaykv.kernels.staging import Staging


def relay(
    cache: KVCache,
    copies: Sequence[RelayCopy],
    inv_freq: NDArray[np.float64],
    staging: Staging,
    shift_copy: ShiftCopy,
) -> None:
    """Copies all layers of K, V, the hidden states and the influence of segments, all at once.

    Args:
        inv_freq: the model's rotary frequencies, [rotary_dim / 2]. Angles of shifts are fp64.
        shift_copy: the kernel.
    """
    if not copies:
        return
    size = cache.block_size
    source = [_slots(c.source_block_ids, c.source_start, c.num_tokens, size) for c in copies]
    target = [_slots(c.block_ids, c.start, c.num_tokens, size) for c in copies]
    segment = np.repeat(np.arange(len(copies)), [c.num_tokens for c in copies])
    angles = np.array([c.shift for c in copies])[:, None] * inv_freq
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    arrays = (np.concatenate(source), np.concatenate(target), segment, cos, sin)
    shift_copy(cache.k, cache.v, cache.hidden, cache.influence, *staging.upload(arrays))


def _slots(block_ids: Sequence[int], start: int, num_tokens: int, block_size: int) -> IntArray:
    """Slots of positions [start, start + num_tokens) of a sequence."""
    positions = np.arange(start, start + num_tokens)
    blocks = np.array(block_ids, dtype=np.int64)[positions // block_size]
    slots: IntArray = blocks * block_size + positions % block_size
    return slots
