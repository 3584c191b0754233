"""The attention that cached tokens receive from decoding rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)


def add_influence(
    received: Tensor,
    q: Tensor,
    k_cache: Tensor,
    lse: Tensor,
    block_ids: Tensor,
    block_indptr: Tensor,
    num_keys: Tensor,
    counts: Tensor,
    block_size: int,
    scale: float,
) -> None:
    """Adds each key's attention probability, summed over query heads, to its slot, in place.

    This is RelayCaching's Eq. 6 for one layer and one step. The probability is taken from the
    row's log-sum-exp, so the scores need no second pass for their sum:
    2 ** (q . k * scale * log2(e) - lse).

    It reads the keys of the rows that count once and no values, which is half of what decode
    attention reads in the same layer. Callers bound the cost by calling it on every n-th layer and
    step: on every fourth of both it adds 1/32 of decode attention's memory traffic.

    Args:
        received: fp32 [S].
        q: [n, Hq, D], the queries that attention saw, one row per request.
        k_cache: one layer's keys, [S, Hkv, D]; Hq is a multiple of Hkv.
        lse: fp32 [n, Hq], the base-2 logarithm of the sum of exp(q . k * scale) over the row's
            keys, as FlashInfer returns it.
        block_ids: int32 or int64, flat.
        block_indptr: int32 or int64 [n + 1]; row i's blocks are `block_ids` from block_indptr[i]
            to block_indptr[i + 1], in the order of the sequence. Rows may share blocks.
        num_keys: int32 or int64 [n], how many keys the row attends to, from its first block on.
        counts: int32 [n]; 0: the row adds nothing, and nothing else of it is looked at.
        block_size: tokens of a block.
        scale: what scores are multiplied with.
    """
    num_kv_heads, head_dim = k_cache.shape[1:]
    offsets = torch.arange(block_size, device=block_ids.device)
    for row in counts.nonzero().flatten().tolist():
        start, stop = block_indptr[row : row + 2].tolist()
        blocks = block_ids[start:stop].to(torch.int64)
        slots = (blocks[:, None] * block_size + offsets).flatten()[: int(num_keys[row])]
        keys = k_cache.index_select(0, slots).float().transpose(0, 1)  # [Hkv, keys, D]
        queries = q[row].float().view(num_kv_heads, -1, head_dim)  # [Hkv, gqa, D]
        scores = torch.bmm(queries, keys.transpose(1, 2)) * (scale * _LOG2_E)
        probabilities = torch.exp2(scores - lse[row].view(num_kv_heads, -1, 1))
        received.index_add_(0, slots, probabilities.sum(dim=(0, 1)))
