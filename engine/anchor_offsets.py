"""Carries out on the device what anchors are for: measures, stores and adds their offsets.

Anchors live in the KV cache's own slots; which are kept, and when they serve, the host knows
(`anchor_pools.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaykv.engine.batch import AnchorPlace, AnchorQuery, AnchorRecord, RelayCopy
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.relay import turns
from relaykv.kernels.anchor_distance import anchor_weights
from relaykv.kernels.attention import IntArray
from relaykv.kernels.kernel_set import KernelSet
from relaykv.kernels.staging import Staging
from relaykv.kernels.store_offset import store_offset


def anchor_distances(
    cache: KVCache, queries: Sequence[AnchorQuery], staging: Staging, kernels: KernelSet
) -> list[list[float]]:
    """How far the values of each segment are from those of each of its anchors. Waits.

    The norm of the difference over all layers, heads, channels and tokens (KVCOMM, Eq. 5).

    Args:
        queries: at least one, each with anchors.
    """
    source = [cache.flat_slots(q.source_block_ids, q.source_start, q.num_tokens) for q in queries]
    bases = [_bases(cache, query.anchors, query.num_tokens) for query in queries]
    slots, anchors = staging.upload([np.concatenate(source), _padded(bases)])
    squares = kernels.anchor_distance(cache.v, slots, anchors)  # [tokens, anchors]
    stops = np.cumsum([query.num_tokens for query in queries]).tolist()
    sums = [squares[a:b].sum(dim=0) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    rows = torch.stack(sums).sqrt().tolist()  # one transfer, whatever the number of segments
    return [row[: len(query.anchors)] for row, query in zip(rows, queries, strict=True)]


def store_anchors(
    cache: KVCache,
    records: Sequence[AnchorRecord],
    inv_freq: NDArray[np.float64],
    staging: Staging,
) -> None:
    """Writes the offsets of computed segments to their anchors' blocks. Does not wait.

    Args:
        inv_freq: the model's rotary frequencies, [rotary_dim / 2].
    """
    arrays: list[NDArray[Any]] = []
    for record in records:
        copy = record.copy
        arrays.append(cache.flat_slots(copy.source_block_ids, copy.source_start, copy.num_tokens))
        arrays.append(cache.flat_slots(copy.block_ids, copy.start, copy.num_tokens))
        arrays.append(cache.flat_slots(record.place.offset_block_ids, 0, copy.num_tokens))
        arrays += turns([-copy.source_start, -copy.start], inv_freq)
    brought = iter(staging.upload(arrays))
    for _ in records:
        source, target, place, cos, sin = (next(brought) for _ in range(5))
        store_offset(cache.k, cache.v, source, target, place, cos, sin)


def add_anchors(
    cache: KVCache,
    copies: Sequence[RelayCopy],
    inv_freq: NDArray[np.float64],
    staging: Staging,
    kernels: KernelSet,
) -> None:
    """Corrects relayed segments, which stand in their place already, by their anchors' offsets.

    Every token has weights of its own: by the distance of its values from those of the token at the
    same place in each anchor. The same weights serve its key (the authors' code measures keys too,
    and keeps them for that).

    Args:
        copies: with anchors.
        inv_freq: the model's rotary frequencies, [rotary_dim / 2].
    """
    targets = [cache.flat_slots(c.block_ids, c.start, c.num_tokens) for c in copies]
    segment = np.repeat(np.arange(len(copies)), [copy.num_tokens for copy in copies])
    bases = [_bases(cache, copy.anchors, copy.num_tokens) for copy in copies]
    offsets = [_offsets(cache, copy.anchors, copy.num_tokens) for copy in copies]
    arrays = [np.concatenate(targets), segment, _padded(bases), _padded(offsets)]
    arrays += turns([copy.start for copy in copies], inv_freq)
    target, segments, base_slots, offset_slots, cos, sin = staging.upload(arrays)
    weights = anchor_weights(kernels.anchor_distance(cache.v, target, base_slots))
    kernels.add_anchored(cache.k, cache.v, offset_slots, weights, target, segments, cos, sin)


def _bases(cache: KVCache, anchors: Sequence[AnchorPlace], num_tokens: int) -> IntArray:
    """Slots of the anchors' values, [tokens, anchors]."""
    slots = [cache.flat_slots(a.base_block_ids, a.base_start, num_tokens) for a in anchors]
    return np.stack(slots, axis=1)


def _offsets(cache: KVCache, anchors: Sequence[AnchorPlace], num_tokens: int) -> IntArray:
    """Slots of the anchors' offsets, [tokens, anchors]."""
    slots = [cache.flat_slots(anchor.offset_block_ids, 0, num_tokens) for anchor in anchors]
    return np.stack(slots, axis=1)


def _padded(parts: Sequence[IntArray]) -> IntArray:
    """The parts one below the other, with -1 where one has fewer anchors than another."""
    width = max(part.shape[1] for part in parts)
    rows = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in parts]
    return np.concatenate(rows)
