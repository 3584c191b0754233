"""A whole forward pass with plain causal attention: the oracle for everything that caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relaykv.engine.models.decoder import DecoderModel


@torch.inference_mode()
def dense_logits(model: DecoderModel, token_ids: list[int]) -> Tensor:
    """fp32 logits [n, vocab] of a sequence computed from nothing."""
    config = model.config
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.device)
    cos, sin = model.rope(torch.arange(len(token_ids), device=model.device))
    hidden = model.embed(ids)
    for layer in range(config.num_layers):
        q, k, v = (x.transpose(0, 1) for x in model.project_qkv(layer, hidden, cos, sin))
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)  # [Hq, n, D]
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = model.finish_layer(layer, hidden, attention.transpose(0, 1))
    return model.logits(hidden)
