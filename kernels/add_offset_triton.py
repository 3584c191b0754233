"""Adds a segment's offset to its cached tokens on a CUDA device: `add_offset` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _add_offset(
    k: tl.tensor,
    v: tl.tensor,
    offsets: tl.tensor,
    index: tl.tensor,
    target: tl.tensor,
    segment: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer_stride: tl.tensor,
    num_layers: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HEADS_PADDED: tl.constexpr,  # noqa: N803
    HALF_PADDED: tl.constexpr,  # noqa: N803
    REST_PADDED: tl.constexpr,  # noqa: N803
    ROW_PADDED: tl.constexpr,  # noqa: N803
) -> None:
    """One token of one layer a program. HALF is r / 2; the rest of a head is not rotated."""
    token = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    row_size: tl.constexpr = NUM_HEADS * HEAD_DIM
    # 64 bits: all layers' keys together have more elements than 32 bits can count.
    row_start = layer * layer_stride + tl.load(target + token) * row_size
    number = tl.load(segment + token)
    key_start = (tl.load(index + number) * 2 * num_layers + layer) * row_size
    value_start = key_start + num_layers * row_size
    angle_start = number * HALF

    heads = tl.arange(0, HEADS_PADDED)
    is_head = heads < NUM_HEADS
    angles = tl.arange(0, HALF_PADDED)
    is_angle = angles < HALF
    cosines = tl.load(cos + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    sines = tl.load(sin + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    places = heads[:, None] * HEAD_DIM + angles[None, :]  # [heads, r / 2]
    mask = is_head[:, None] & is_angle[None, :]
    dtype = k.dtype.element_ty
    first = scale * tl.load(offsets + key_start + places, mask=mask, other=0.0)
    second = scale * tl.load(offsets + key_start + HALF + places, mask=mask, other=0.0)
    key = tl.load(k + row_start + places, mask=mask, other=0.0).to(tl.float32)
    added = key + (first * cosines - second * sines)
    tl.store(k + row_start + places, added.to(dtype), mask=mask)
    key = tl.load(k + row_start + HALF + places, mask=mask, other=0.0).to(tl.float32)
    added = key + (second * cosines + first * sines)
    tl.store(k + row_start + HALF + places, added.to(dtype), mask=mask)

    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_PADDED)
        places = heads[:, None] * HEAD_DIM + rest[None, :]
        mask = is_head[:, None] & (rest < HEAD_DIM)[None, :]
        key = tl.load(k + row_start + places, mask=mask, other=0.0).to(tl.float32)
        added = key + scale * tl.load(offsets + key_start + places, mask=mask, other=0.0)
        tl.store(k + row_start + places, added.to(dtype), mask=mask)

    elements = tl.arange(0, ROW_PADDED)
    mask = elements < row_size
    value = tl.load(v + row_start + elements, mask=mask, other=0.0).to(tl.float32)
    added = value + scale * tl.load(offsets + value_start + elements, mask=mask, other=0.0)
    tl.store(v + row_start + elements, added.to(dtype), mask=mask)


def add_offset_triton(
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    index: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
) -> None:
    """Adds `scale * offsets[index[segment[i]]]` to slot `target[i]`; see `add_offset.add_offset`.

    Multiplications and additions are not fused, so it rounds as plain torch does.

    Args:
        k, v: the cache, [L, S, Hkv, D], contiguous.
        offsets: fp32 [N, 2, L, Hkv, D], contiguous.
        index: int64 [segments].
        target: int64 [n] slots, all different.
        segment: int64 [n], the segment of a token.
        cos, sin: fp32 [segments, r / 2], contiguous, 0 < r <= D.
        scale: how much of the offsets is added.
    """
    num_layers, _, num_kv_heads, head_dim = k.shape
    half = cos.shape[1]
    _add_offset[(target.shape[0], num_layers)](
        k,
        v,
        offsets,
        index,
        target,
        segment,
        cos,
        sin,
        k.stride(0),
        num_layers,
        scale,
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        ROW_PADDED=triton.next_power_of_2(num_kv_heads * head_dim),
        num_warps=4,
        enable_fp_fusion=False,
    )
