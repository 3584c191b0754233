"""Shapes of the models that the papers measured, from their public config.json files. No weights.

The layer bands are those that RelayCaching (arXiv 2603.13289, Table 5) found for the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relaykv.engine.config import ModelConfig
from relaykv.engine.models.families import model_config_from_hf
from relaykv.engine.policy import Bands


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model without its weights."""

    name: str
    config: ModelConfig
    bands: Bands  # of the policy `relay`


def llama_8b() -> ModelShape:
    return _shape("Llama-3.1-8B", _LLAMA_8B, Bands(1, 3, 18))


def qwen3_06b() -> ModelShape:
    return _shape("Qwen3-0.6B", _QWEN3_06B, Bands(2, 3, 19))


def toy_llama() -> ModelShape:
    """Small enough for a dry run, with everything that the large shape has."""
    return _shape("toy Llama", _LLAMA_8B | _TOY, Bands(1, 2, 3))


def toy_qwen3() -> ModelShape:
    return _shape("toy Qwen3", _QWEN3_06B | _TOY, Bands(1, 2, 2))


_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def _shape(name: str, config: Mapping[str, Any], bands: Bands) -> ModelShape:
    return ModelShape(name, model_config_from_hf(config), bands)
