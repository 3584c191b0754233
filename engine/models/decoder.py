"""A decoder-only model of the Llama kind, cut where the set of rows may change.

The caller runs the layers: `project_qkv`, then its own attention, then `finish_layer`. Between
two layers it may drop rows or add rows, since nothing here remembers any.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relaykv.engine.config import ModelConfig, RopeConfig
from relaykv.engine.models.layers import LayerWeights
from relaykv.kernels.kernel_set import KernelSet, torch_kernels
from relaykv.kernels.rope import cos_sin, inverse_frequencies, llama3_inverse_frequencies


class DecoderModel:
    """Weights and arithmetic; holds no state of any request.

    n rows, hidden size d, Hq query heads and Hkv key-value heads of size D, r rotated
    dimensions of a head.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: tuple[LayerWeights, ...],
        final_norm: Tensor,
        head: Tensor,
        kernels: KernelSet | None = None,
    ) -> None:
        """Takes weights of one dtype on one device.

        Args:
            config: the model's shape.
            embedding: [vocab, d].
            layers: one entry per layer.
            final_norm: [d].
            head: [vocab, d]; the embedding itself when the two are tied. Logits are computed in
                its dtype.
            kernels: fit for that device; None: plain torch.
        """
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.final_norm = final_norm
        self.kernels = kernels or torch_kernels()
        self.inv_freq = rope_frequencies(config.rope)  # fp64 [r / 2], on the CPU
        self._inv_freq = self.inv_freq.to(self.device)
        self._embedding = embedding
        self._layers = layers
        self._head = head

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 [n, r / 2], of int64 [n] positions or shifts."""
        return cos_sin(self._inv_freq, positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [n, d] that enter layer 0, of int64 [n] token ids."""
        return F.embedding(token_ids, self._embedding)

    def project_qkv(
        self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, Hq, D], keys [n, Hkv, D], both rotated, and values [n, Hkv, D].

        Args:
            layer: which one, from 0.
            hidden: [n, d], the states that enter the layer.
            cos: fp32 [n, r / 2], from `rope`.
            sin: fp32 [n, r / 2], from `rope`.
        """
        config, weights = self.config, self._layers[layer]
        rms_norm = self.kernels.rms_norm
        normed = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        heads = F.linear(normed, weights.qkv, weights.qkv_bias).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        num_rotated = config.num_heads + config.num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query_key[:, : config.num_heads], weights.q_norm, config.rms_norm_eps)
            key = rms_norm(query_key[:, config.num_heads :], weights.k_norm, config.rms_norm_eps)
            query_key = torch.cat((query, key), dim=1)
        query_key = self.kernels.apply_rope(query_key, cos, sin)
        return query_key[:, : config.num_heads], query_key[:, config.num_heads :], value

    def finish_layer(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Output projection and feed-forward, both with their residual.

        Args:
            layer: which one, from 0.
            hidden: [n, d], the states that entered the layer.
            attention: [n, Hq, D], what attention gave for the same rows.

        Returns:
            [n, d], the states that leave the layer.

        `hidden` may be overwritten.
        """
        weights, kernels = self._layers[layer], self.kernels
        out = F.linear(attention.flatten(1), weights.out, weights.out_bias)
        eps = self.config.rms_norm_eps
        normed, hidden = kernels.add_rms_norm(out, hidden, weights.post_norm, eps)
        inner = kernels.silu_and_mul(F.linear(normed, weights.gate_up, weights.gate_up_bias))
        return hidden + F.linear(inner, weights.down, weights.down_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] of the [n, d] states that left the last layer."""
        normed = self.kernels.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return F.linear(normed.to(self._head.dtype), self._head).float()


def rope_frequencies(rope: RopeConfig) -> Tensor:
    """The model's angle per position, fp64 [rotary_dim / 2], on the CPU."""
    inv_freq = inverse_frequencies(rope.theta, rope.rotary_dim)
    if rope.llama3_factor is None:
        return inv_freq
    return llama3_inverse_frequencies(
        inv_freq,
        rope.llama3_factor,
        rope.llama3_low_freq_factor,
        rope.llama3_high_freq_factor,
        rope.llama3_original_max_len,
    )
