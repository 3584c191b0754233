"""Writes fresh keys and values into the cache on a CUDA device: `store_kv` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Scalars are annotated as tensors: Triton reads `int` as 32 bits, which strides may outgrow.
@triton.jit  # type: ignore[untyped-decorator]
def _store_kv(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_row_stride: tl.tensor,
    v_row_stride: tl.tensor,
    ROW: tl.constexpr,  # noqa: N803
    ROW_PADDED: tl.constexpr,  # noqa: N803
) -> None:
    """One row of all heads a program."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    elements = tl.arange(0, ROW_PADDED)
    mask = elements < ROW
    key = tl.load(k + row * k_row_stride + elements, mask=mask)
    value = tl.load(v + row * v_row_stride + elements, mask=mask)
    tl.store(k_cache + slot * ROW + elements, key, mask=mask)
    tl.store(v_cache + slot * ROW + elements, value, mask=mask)


def store_kv_triton(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Puts row i of `k` and `v` into slot `slots[i]`, in place; see `store_kv.store_kv`.

    Of rows that name the same slot one wins, element by element: rows that only pad a batch may
    share a slot that nobody reads.

    Args:
        k_cache: [S, Hkv, D], contiguous, one layer's keys.
        v_cache: [S, Hkv, D], contiguous, one layer's values.
        slots: int64 [n], contiguous.
        k: [n, Hkv, D] in the cache's dtype. A slice of a fused projection will do: rows may have
            any stride, the heads of a row must lie behind one another.
        v: like `k`.

    Raises:
        ValueError: the heads of a row of `k` or `v` do not lie behind one another.
    """
    num_kv_heads, head_dim = k_cache.shape[1:]
    for rows in (k, v):
        if rows.stride()[1:] != (head_dim, 1):
            raise ValueError(f"strides {rows.stride()} of rows whose heads are not dense")
    size = num_kv_heads * head_dim
    _store_kv[(slots.shape[0],)](
        k_cache,
        v_cache,
        slots,
        k,
        v,
        k.stride(0),
        v.stride(0),
        ROW=size,
        ROW_PADDED=triton.next_power_of_2(size),
        num_warps=4,
        enable_fp_fusion=False,
    )
