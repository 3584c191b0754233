"""How far fresh values lie from cached ones, on a CUDA device: `deviation` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _deviation(
    out: tl.tensor,
    fresh: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEADS_PADDED: tl.constexpr,  # noqa: N803
    DIM_PADDED: tl.constexpr,  # noqa: N803
    COSINE: tl.constexpr,  # noqa: N803
) -> None:
    """One token a program; its values are a tile [heads, head dim], padded with zeros."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    heads = tl.arange(0, HEADS_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    fresh_offsets = row * row_stride + heads[:, None] * head_stride + dims[None, :]
    cache_offsets = (slot * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    a = tl.load(fresh + fresh_offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(cache + cache_offsets, mask=mask, other=0.0).to(tl.float32)
    if COSINE:
        dots = tl.sum(a * b, axis=1)
        norms = tl.sqrt(tl.sum(a * a, axis=1)) * tl.sqrt(tl.sum(b * b, axis=1))
        deviations = 1.0 - dots / tl.maximum(norms, 1e-12)
        deviations = tl.where(heads < NUM_HEADS, deviations, 0.0)
        tl.store(out + row, tl.sum(deviations, axis=0) / NUM_HEADS)
    else:
        difference = a - b
        tl.store(out + row, tl.sum(tl.sum(difference * difference, axis=1), axis=0))


def cosine_deviation_triton(fresh: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """One minus the cosine, mean over KV heads; see `deviation.cosine_deviation`.

    Args:
        fresh: values, [n, Hkv, D]; only the dimensions of a head must lie behind one another.
        cache: one layer's values, [S, Hkv, D], contiguous.
        slots: int64 [n], contiguous.

    Returns:
        fp32 [n].

    Raises:
        ValueError: the dimensions of a head do not lie behind one another.
    """
    return _launch(fresh, cache, slots, is_cosine=True)


def squared_deviation_triton(fresh: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Sum of squared differences; see `deviation.squared_deviation`.

    Args:
        fresh: values, [n, Hkv, D]; only the dimensions of a head must lie behind one another.
        cache: one layer's values, [S, Hkv, D], contiguous.
        slots: int64 [n], contiguous.

    Returns:
        fp32 [n].

    Raises:
        ValueError: the dimensions of a head do not lie behind one another.
    """
    return _launch(fresh, cache, slots, is_cosine=False)


def _launch(fresh: Tensor, cache: Tensor, slots: Tensor, is_cosine: bool) -> Tensor:
    if fresh.stride(2) != 1:
        raise ValueError(f"strides {fresh.stride()} of values whose heads are not dense")
    num_kv_heads, head_dim = cache.shape[1:]
    out = torch.empty(slots.shape[0], dtype=torch.float32, device=fresh.device)
    _deviation[(slots.shape[0],)](
        out,
        fresh,
        cache,
        slots,
        fresh.stride(0),
        fresh.stride(1),
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
        COSINE=is_cosine,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
