"""The mask of scattered rows as an attention variant that FlashInfer compiles into its kernel.

A row sees the keys at or before its own position, which a causal mask cannot say when the rows of
a request have gaps: that one aligns the last row with the last key and counts backwards. The
variant reads the position of each row instead, 4 bytes a row, and no mask is ever materialised.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

VARIANT_NAME = "ScatteredCausalAttention"

# FlashInfer's kernel asks LogitsMask about every key of a group when the wrapper says that the
# variant owns the mask. Three things it leaves to the variant:
# - Where the traversal of keys begins follows from qo_len and window_left; a window as long as the
#   keys begins it at the first one.
# - Rows that only pad a tile are asked about too, hence the clamped row.
# - Scores are exponentiated to base 2, so the scale takes log2(e) along.
VARIANT_DECLARATION = r"""
struct ScatteredCausalAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t qo_len, kv_len, window_left, first_row;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ ScatteredCausalAttention(const Params& params, uint32_t batch_idx,
                                               uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    first_row = params.q_indptr[batch_idx];
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t row = first_row + (qo_idx < qo_len ? qo_idx : qo_len - 1);
    return int32_t(kv_idx) <= params.q_pos[row];
  })
};
"""


def scattered_causal_jit_args(dtype: torch.dtype, head_dim: int) -> list[Any]:
    """`jit_args` of FlashInfer's paged prefill wrapper, backend "fa2".

    With them, `run(q, (k, v), q_pos)` takes one more tensor: int32 [rows], the position of each
    row among the keys of its group. FlashInfer fills in `sm_scale` by itself.

    Args:
        dtype: of queries, keys, values and the result.
    """
    # What is built is kept under this name, so another text must have another one.
    digest = hashlib.sha256(VARIANT_DECLARATION.encode()).hexdigest()[:12]
    type_name = str(dtype).removeprefix("torch.")
    return [
        f"relaykv_scattered_causal_{digest}_{type_name}_head_dim_{head_dim}",
        dtype,
        dtype,
        dtype,
        torch.int32,
        head_dim,
        head_dim,
        ["q_pos"],
        ["int32_t"],
        ["sm_scale"],
        ["double"],
        VARIANT_NAME,
        VARIANT_DECLARATION,
    ]


def scattered_causal_jit_kwargs() -> dict[str, Any]:
    """`jit_kwargs` that go with them: keys and values have equal strides, half as much to build."""
    return {"paged_kv_stride_mode": "equal"}
