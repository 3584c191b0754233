"""Carries out relay copies: recordings' KV brought to its place in other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.batch import RelayCopy
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.offset_memory import OFFSET_SCALE
from relaykv.kernels.kernel_set import AddOffset, ShiftCopy
from relaykv.kernels.staging import Staging


def relay(
    cache: KVCache,
    copies: Sequence[RelayCopy],
    offsets: Tensor,
    inv_freq: NDArray[np.float64],
    staging: Staging,
    shift_copy: ShiftCopy,
    add_offset: AddOffset,
) -> None:
    """Copies all layers of K, V, the hidden states and the influence of segments, all at once.

    Where a copy names an offset, most of that is then added to its keys and values.

    Args:
        offsets: fp32 [N, 2, L, Hkv, D], of keys in a segment that starts at position 0, and of
            values.
        inv_freq: the model's rotary frequencies, [rotary_dim / 2]. Angles of shifts are fp64.
        shift_copy, add_offset: the kernels.
    """
    if not copies:
        return
    source = [cache.flat_slots(c.source_block_ids, c.source_start, c.num_tokens) for c in copies]
    shifts = [copy.shift for copy in copies]
    arrays = [np.concatenate(source), *_targets(cache, copies), *turns(shifts, inv_freq)]
    corrected = [copy for copy in copies if copy.offset_index is not None]
    if corrected:
        starts = [copy.start for copy in corrected]
        index = np.array([copy.offset_index for copy in corrected], dtype=np.int64)
        arrays += [index, *_targets(cache, corrected), *turns(starts, inv_freq)]
    brought = staging.upload(arrays)
    shift_copy(cache.k, cache.v, cache.hidden, cache.influence, *brought[:5])
    if corrected:
        number, target, segment, cos, sin = brought[5:]
        add_offset(cache.k, cache.v, offsets, number, target, segment, cos, sin, OFFSET_SCALE)


def _targets(cache: KVCache, copies: Sequence[RelayCopy]) -> list[NDArray[Any]]:
    """The slots that copies fill, and to which of the copies each belongs."""
    slots = [cache.flat_slots(c.block_ids, c.start, c.num_tokens) for c in copies]
    segment = np.repeat(np.arange(len(copies)), [c.num_tokens for c in copies])
    return [np.concatenate(slots), segment]


def turns(positions: Sequence[int], inv_freq: NDArray[np.float64]) -> list[NDArray[Any]]:
    """Cosines and sines of the angles by which keys turn over so many positions."""
    angles = np.array(positions)[:, None] * inv_freq
    return [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
