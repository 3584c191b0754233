"""The weights of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Hq query heads, Hkv key-value heads of size D, hidden size d, feed-forward size f."""

    input_norm: Tensor  # [d]
    qkv: Tensor  # [(Hq + 2 * Hkv) * D, d]: queries, keys, values
    qkv_bias: Tensor | None  # [(Hq + 2 * Hkv) * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [d, Hq * D]
    out_bias: Tensor | None  # [d]
    post_norm: Tensor  # [d]
    gate_up: Tensor  # [2 * f, d]: gate, up
    gate_up_bias: Tensor | None  # [2 * f]
    down: Tensor  # [d, f]
    down_bias: Tensor | None  # [d]
