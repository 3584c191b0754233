"""Copies cached tokens to other slots on a CUDA device: `shift_copy` in Triton.

Without a temporary copy: the torch version gathers every layer's keys before it writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Elements of a hidden state that one program copies.
_HIDDEN_BLOCK = 1024


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _shift_copy_kv(
    k: tl.tensor,
    v: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    segment: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer_stride: tl.tensor,
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
    # 64 bits: all layers' keys together have more elements than 32 bits can count.
    layer_start = tl.program_id(1).to(tl.int64) * layer_stride
    row_size: tl.constexpr = NUM_HEADS * HEAD_DIM
    source_start = layer_start + tl.load(source + token) * row_size
    target_start = layer_start + tl.load(target + token) * row_size
    angle_start = tl.load(segment + token) * HALF

    heads = tl.arange(0, HEADS_PADDED)
    is_head = heads < NUM_HEADS
    angles = tl.arange(0, HALF_PADDED)
    is_angle = angles < HALF
    cosines = tl.load(cos + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    sines = tl.load(sin + angle_start + angles, mask=is_angle, other=0.0)[None, :]
    offsets = heads[:, None] * HEAD_DIM + angles[None, :]  # [heads, r / 2]
    mask = is_head[:, None] & is_angle[None, :]
    dtype = k.dtype.element_ty
    first = tl.load(k + source_start + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(k + source_start + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cosines - second * sines
    rotated_second = second * cosines + first * sines
    tl.store(k + target_start + offsets, rotated_first.to(dtype), mask=mask)
    tl.store(k + target_start + HALF + offsets, rotated_second.to(dtype), mask=mask)

    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_PADDED)
        offsets = heads[:, None] * HEAD_DIM + rest[None, :]
        mask = is_head[:, None] & (rest < HEAD_DIM)[None, :]
        tl.store(k + target_start + offsets, tl.load(k + source_start + offsets, mask=mask), mask)

    elements = tl.arange(0, ROW_PADDED)
    mask = elements < row_size
    tl.store(v + target_start + elements, tl.load(v + source_start + elements, mask=mask), mask)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_hidden(
    hidden: tl.tensor,
    influence: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    hidden_size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One block of one token's hidden state a program; the first also copies its influence."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    source_slot = tl.load(source + token)
    target_slot = tl.load(target + token)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < hidden_size
    values = tl.load(hidden + source_slot * hidden_size + offsets, mask=mask)
    tl.store(hidden + target_slot * hidden_size + offsets, values, mask=mask)
    if block == 0:
        tl.store(influence + target_slot, tl.load(influence + source_slot))


def shift_copy_triton(
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    influence: Tensor,
    source: Tensor,
    target: Tensor,
    segment: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Copies slot `source[i]` to slot `target[i]` in every layer; see `shift_copy.shift_copy`.

    Multiplications and additions are not fused, so the rotation rounds as plain torch does.

    Args:
        k, v: the cache, [L, S, Hkv, D], contiguous.
        hidden: [S, d], contiguous.
        influence: fp32 [S].
        source: int64 [n] slots; one may occur several times.
        target: int64 [n] slots, all different. No slot is both a source and a target: programs
            run in any order.
        segment: int64 [n], the row of `cos` and `sin` that holds a token's shift.
        cos, sin: fp32 [segments, r / 2], contiguous, 0 < r <= D.
    """
    num_layers, _, num_kv_heads, head_dim = k.shape
    num_tokens = source.shape[0]
    half = cos.shape[1]
    _shift_copy_kv[(num_tokens, num_layers)](
        k,
        v,
        source,
        target,
        segment,
        cos,
        sin,
        k.stride(0),
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
    hidden_size = hidden.shape[1]
    _copy_hidden[(num_tokens, triton.cdiv(hidden_size, _HIDDEN_BLOCK))](
        hidden,
        influence,
        source,
        target,
        hidden_size,
        BLOCK=_HIDDEN_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
