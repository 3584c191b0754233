"""Adds anchors' offsets to cached tokens on a CUDA device: `add_anchored` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _add_anchored_keys(
    k: tl.tensor,
    offsets: tl.tensor,
    weights: tl.tensor,
    target: tl.tensor,
    segment: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer_stride: tl.tensor,
    num_anchors: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HEADS_PADDED: tl.constexpr,  # noqa: N803
    HALF_PADDED: tl.constexpr,  # noqa: N803
) -> None:
    """One token of one layer a program; of each head what is rotated. HALF is r / 2."""
    token = tl.program_id(0)
    # 64 bits: all layers' keys together have more elements than 32 bits can count.
    layer_start = tl.program_id(1).to(tl.int64) * layer_stride
    row_size: tl.constexpr = NUM_HEADS * HEAD_DIM
    heads = tl.arange(0, HEADS_PADDED)
    angles = tl.arange(0, HALF_PADDED)
    is_angle = angles < HALF
    places = heads[:, None] * HEAD_DIM + angles[None, :]  # [heads, r / 2]
    mask = (heads < NUM_HEADS)[:, None] & is_angle[None, :]
    first = tl.zeros([HEADS_PADDED, HALF_PADDED], dtype=tl.float32)
    second = tl.zeros([HEADS_PADDED, HALF_PADDED], dtype=tl.float32)
    for number in range(num_anchors):
        slot = tl.load(offsets + token * num_anchors + number)
        if slot >= 0:
            weight = tl.load(weights + token * num_anchors + number)
            row = k + layer_start + slot * row_size + places
            first += weight * tl.load(row, mask=mask, other=0.0).to(tl.float32)
            second += weight * tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    angle_start = tl.load(segment + token) * HALF
    cosines = tl.load(cos + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    sines = tl.load(sin + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    dtype = k.dtype.element_ty
    row = k + layer_start + tl.load(target + token) * row_size + places
    key = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    tl.store(row, (key + (first * cosines - second * sines)).to(dtype), mask=mask)
    key = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(row + HALF, (key + (second * cosines + first * sines)).to(dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _add_anchored_plain(
    cache: tl.tensor,
    offsets: tl.tensor,
    weights: tl.tensor,
    target: tl.tensor,
    layer_stride: tl.tensor,
    num_anchors: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    HEADS_PADDED: tl.constexpr,  # noqa: N803
    DIM_PADDED: tl.constexpr,  # noqa: N803
) -> None:
    """One token of one layer a program; of each head what is not rotated, FIRST on."""
    token = tl.program_id(0)
    layer_start = tl.program_id(1).to(tl.int64) * layer_stride
    row_size: tl.constexpr = NUM_HEADS * HEAD_DIM
    heads = tl.arange(0, HEADS_PADDED)
    channels = FIRST + tl.arange(0, DIM_PADDED)
    places = heads[:, None] * HEAD_DIM + channels[None, :]  # [heads, D - FIRST]
    mask = (heads < NUM_HEADS)[:, None] & (channels < HEAD_DIM)[None, :]
    total = tl.zeros([HEADS_PADDED, DIM_PADDED], dtype=tl.float32)
    for number in range(num_anchors):
        slot = tl.load(offsets + token * num_anchors + number)
        if slot >= 0:
            weight = tl.load(weights + token * num_anchors + number)
            row = cache + layer_start + slot * row_size + places
            total += weight * tl.load(row, mask=mask, other=0.0).to(tl.float32)
    row = cache + layer_start + tl.load(target + token) * row_size + places
    added = tl.load(row, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(row, added.to(cache.dtype.element_ty), mask=mask)


def add_anchored_triton(
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    weights: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Adds a weighted sum of the slots `offsets[i]` to slot `target[i]`; see `add_anchored`.

    Multiplications and additions are not fused, so it rounds as plain torch does.

    Args:
        k, v: the cache, [L, S, Hkv, D], contiguous.
        offsets: int64 [n, A] slots, contiguous; a negative one counts for nothing.
        weights: fp32 [n, A], contiguous.
        target: int64 [n] slots, all different, none of them among `offsets`.
        segment: int64 [n].
        cos, sin: fp32 [segments, r / 2], contiguous, 0 < r <= D.
    """
    num_layers, _, num_kv_heads, head_dim = k.shape
    num_tokens, num_anchors = offsets.shape
    half = cos.shape[1]
    heads_padded = triton.next_power_of_2(num_kv_heads)
    grid = (num_tokens, num_layers)
    _add_anchored_keys[grid](
        k,
        offsets,
        weights,
        target,
        segment,
        cos,
        sin,
        k.stride(0),
        num_anchors,
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS_PADDED=heads_padded,
        HALF_PADDED=triton.next_power_of_2(half),
        num_warps=4,
        enable_fp_fusion=False,
    )
    # Values are not rotated at all, keys perhaps not to their end.
    for cache, first in ((v, 0), (k, 2 * half)):
        if first < head_dim:
            _add_anchored_plain[grid](
                cache,
                offsets,
                weights,
                target,
                cache.stride(0),
                num_anchors,
                NUM_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                FIRST=first,
                HEADS_PADDED=heads_padded,
                DIM_PADDED=triton.next_power_of_2(head_dim - first),
                num_warps=4,
                enable_fp_fusion=False,
            )
