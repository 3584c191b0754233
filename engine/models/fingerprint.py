"""A name for a model that does not depend on the dtype it runs in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch
from torch import Tensor

from relaykv.engine.config import ModelConfig

# Neither changes what a token's keys and values are.
_NOT_ARCHITECTURE = ("max_model_len", "eos_token_ids")


def model_fingerprint(config: ModelConfig, final_norm: Tensor) -> str:
    """16 hex digits over the architecture and the final norm's weights [d], cast to bf16."""
    fields = {k: v for k, v in asdict(config).items() if k not in _NOT_ARCHITECTURE}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    weights = final_norm.detach().to("cpu", torch.bfloat16).contiguous()
    digest.update(weights.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
