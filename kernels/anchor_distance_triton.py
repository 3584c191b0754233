"""Distances between cached values on a CUDA device: `anchor_distance` in Triton.

Without a temporary copy: the torch version makes one of every anchor's values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _anchor_distance(
    v: tl.tensor,
    source: tl.tensor,
    anchors: tl.tensor,
    distances: tl.tensor,
    layer_stride: tl.tensor,
    num_layers: tl.tensor,
    num_anchors: tl.tensor,
    ROW_SIZE: tl.constexpr,  # noqa: N803
    ROW_PADDED: tl.constexpr,  # noqa: N803
) -> None:
    """One token and one anchor a program. A row is all heads of one token in one layer."""
    token = tl.program_id(0)
    place = token * num_anchors + tl.program_id(1)
    anchor_slot = tl.load(anchors + place)
    if anchor_slot < 0:
        tl.store(distances + place, float("inf"))
    else:
        elements = tl.arange(0, ROW_PADDED)
        mask = elements < ROW_SIZE
        # 64 bits: all layers' values together have more elements than 32 bits can count.
        own = v + tl.load(source + token) * ROW_SIZE + elements
        other = v + anchor_slot * ROW_SIZE + elements
        squares = tl.zeros([ROW_PADDED], dtype=tl.float32)
        for _ in range(num_layers):
            value = tl.load(own, mask=mask, other=0.0).to(tl.float32)
            difference = value - tl.load(other, mask=mask, other=0.0).to(tl.float32)
            squares += difference * difference
            own += layer_stride
            other += layer_stride
        tl.store(distances + place, tl.sum(squares, axis=0))


def anchor_distance_triton(v: Tensor, source: Tensor, anchors: Tensor) -> Tensor:
    """Squared distances between cached values; see `anchor_distance.anchor_distance`.

    Args:
        v: the cache, [L, S, Hkv, D], contiguous.
        source: int64 [n] slots.
        anchors: int64 [n, A] slots, contiguous, negative where there is none.

    Returns:
        fp32 [n, A].
    """
    num_layers, _, num_kv_heads, head_dim = v.shape
    num_tokens, num_anchors = anchors.shape
    distances = torch.empty(anchors.shape, dtype=torch.float32, device=v.device)
    row_size = num_kv_heads * head_dim
    _anchor_distance[(num_tokens, num_anchors)](
        v,
        source,
        anchors,
        distances,
        v.stride(0),
        num_layers,
        num_anchors,
        ROW_SIZE=row_size,
        ROW_PADDED=triton.next_power_of_2(row_size),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return distances
