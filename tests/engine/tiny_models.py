"""Tiny random models of every family, saved as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama3 rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def tiny_model(family: str, tied: bool = False, vocab_size: int = 160) -> PreTrainedModel:
    """A random model: 3 layers, 4 query and 2 key-value heads, hidden size 64, fp32."""
    config_type, model_type, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # large, so that attention is far from uniform
        **extra,
    )
    model = model_type(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts these at 0 and 1
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def save_tiny_model(folder: Path, family: str = "llama", tied: bool = False) -> PreTrainedModel:
    """Saves a tiny model as safetensors into `folder` and returns it."""
    model = tiny_model(family, tied)
    model.save_pretrained(folder)
    return model
