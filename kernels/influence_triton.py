"""The attention that tokens receive from decoding rows on a CUDA device: `influence` in Triton."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)
# A tensor core's smallest tile has 16 rows; a group of query heads is padded to them.
_MIN_DOT_SIZE = 16
# Elements of keys that a program holds at a time: 64 keys of 128 dimensions.
_TILE_ELEMENTS = 64 * 128
# Enough programs to fill the largest devices when one row decodes, and a few for every row of a
# large batch, whose rows differ in length.
_MAX_PROGRAMS = 1024
_MIN_ROW_PROGRAMS = 8


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _add_influence(
    received: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    lse: tl.tensor,
    block_ids: tl.tensor,
    block_indptr: tl.tensor,
    num_keys: tl.tensor,
    counts: tl.tensor,
    scale_log2: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GQA: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    GQA_PADDED: tl.constexpr,  # noqa: N803
    DIM_PADDED: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """Every num_programs(1)-th tile of KEYS keys of a row a program, over all heads."""
    row = tl.program_id(0).to(tl.int64)
    # A row that does not count has no keys here, and so no work.
    stop = tl.where(tl.load(counts + row) != 0, tl.load(num_keys + row), 0).to(tl.int32)
    row_blocks = block_ids + tl.load(block_indptr + row)
    group = tl.arange(0, GQA_PADDED)
    is_head = group < GQA
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    query_offsets = row * row_stride + group[:, None] * head_stride + dims[None, :]
    for start in range(tl.program_id(1) * KEYS, stop, tl.num_programs(1) * KEYS):
        index = start + tl.arange(0, KEYS)
        is_key = index < stop
        block = tl.load(row_blocks + index // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + index % BLOCK_SIZE
        key_offsets = slot[None, :] * (NUM_KV_HEADS * HEAD_DIM) + dims[:, None]
        key_mask = is_dim[:, None] & is_key[None, :]
        total = tl.zeros([KEYS], dtype=tl.float32)
        for head in range(NUM_KV_HEADS):
            queries = tl.load(  # [gqa, dim]
                q + query_offsets + head * GQA * head_stride,
                mask=is_head[:, None] & is_dim[None, :],
                other=0.0,
            )
            keys = tl.load(k_cache + key_offsets + head * HEAD_DIM, mask=key_mask, other=0.0)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2  # [gqa, keys]
            # Heads that only pad the group get the probability 2 ** -inf.
            row_lse = tl.load(
                lse + (row * NUM_KV_HEADS + head) * GQA + group, mask=is_head, other=float("inf")
            )
            total += tl.sum(tl.exp2(scores - row_lse[:, None]), axis=0)
        tl.atomic_add(received + slot, total, mask=is_key, sem="relaxed")


def add_influence_triton(
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
    """Adds the attention probabilities of rows to their keys' slots; see `influence.add_influence`.

    The launch depends on nothing but n and the shapes of q and the cache, so that a CUDA graph can
    hold it: programs share out a row's keys, however many there are, and whether a row counts is
    read on the device. Rows that share blocks add to the same slots atomically, so the sum's last
    bits depend on their order.

    It reads the keys of the rows that count once and no values; callers bound the cost by calling
    it on every n-th layer and step. Rows that share a block each read it.

    Args:
        received: fp32 [S].
        q: [n, Hq, D] in the cache's dtype; only the dimensions of a head must lie behind one
            another.
        k_cache: one layer's keys, [S, Hkv, D], contiguous.
        lse: fp32 [n, Hq], base 2, contiguous.
        block_ids: int32 or int64, flat. May be longer than `block_indptr` says.
        block_indptr: int32 or int64 [n + 1].
        num_keys: int32 or int64 [n], less than 2^31.
        counts: int32 [n].
        block_size: tokens of a block.
        scale: what scores are multiplied with.

    Raises:
        ValueError: the dimensions of a head of `q` do not lie behind one another.
    """
    if q.stride(2) != 1:
        raise ValueError(f"strides {q.stride()} of queries whose heads are not dense")
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    gqa = num_heads // num_kv_heads
    dim_padded = max(triton.next_power_of_2(head_dim), _MIN_DOT_SIZE)
    row_programs = max(_MAX_PROGRAMS // max(num_rows, 1), _MIN_ROW_PROGRAMS)
    _add_influence[(num_rows, row_programs)](
        received,
        q,
        k_cache,
        lse,
        block_ids,
        block_indptr,
        num_keys,
        counts,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GQA=gqa,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GQA_PADDED=max(triton.next_power_of_2(gqa), _MIN_DOT_SIZE),
        DIM_PADDED=dim_padded,
        KEYS=max(_TILE_ELEMENTS // dim_padded, _MIN_DOT_SIZE),
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
