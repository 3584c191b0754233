from __future__ import annotations

import logging
from typing import Any

import pytest

from relaykv.engine.config import RopeConfig
from relaykv.engine.models.families import UnsupportedModelError, model_config_from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def of_family(name: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()} | changes


def test_a_llama_config_is_read_whole() -> None:
    config = model_config_from_hf(LLAMA)
    assert config.family == "llama"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_model_len, config.rms_norm_eps) == (64, 8192, 1e-5)
    assert config.rope == RopeConfig(theta=100000.0, rotary_dim=64)
    assert config.tie_word_embeddings
    biases = (config.qkv_bias, config.attention_out_bias, config.mlp_bias)
    assert not any((*biases, config.qk_norm))


def test_both_spellings_of_rope_give_the_same() -> None:
    old = LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}
    new = LLAMA | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}}
    del new["rope_theta"]
    rope = model_config_from_hf(old).rope
    assert rope == model_config_from_hf(new).rope
    assert rope == RopeConfig(500000.0, 64, 8.0, 1.0, 4.0, 8192)


def test_a_null_rope_scaling_is_plain_rope() -> None:
    assert model_config_from_hf(LLAMA | {"rope_scaling": None}).rope.llama3_factor is None


def test_qwen2_has_biases_on_queries_keys_and_values_only() -> None:
    config = model_config_from_hf(of_family("Qwen2", use_sliding_window=False, sliding_window=128))
    assert (config.qkv_bias, config.attention_out_bias, config.qk_norm) == (True, False, False)
    assert config.max_model_len == 8192


def test_qwen3_has_norms_and_a_head_size_of_its_own() -> None:
    config = model_config_from_hf(of_family("Qwen3"))
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 128)


def test_biases_of_llama_come_from_its_config() -> None:
    config = model_config_from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("window", [None, 8192, 100_000])
def test_a_window_that_is_never_crossed_changes_nothing(window: int | None) -> None:
    config = model_config_from_hf(of_family("Mistral", sliding_window=window))
    assert config.max_model_len == 8192


def test_a_shorter_window_caps_the_context_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = model_config_from_hf(of_family("Mistral", sliding_window=4096))
    assert config.max_model_len == 4096
    assert "sliding window of 4096 tokens" in caplog.text


def test_a_mistral_config_without_a_window_has_the_familys_default() -> None:
    assert model_config_from_hf(of_family("Mistral")).max_model_len == 4096


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"num_key_value_heads": 4}, "4 key-value heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        model_config_from_hf(LLAMA | changes)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        ([5, 6], {"eos_token_id": 7}, (5, 6, 7)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(
    in_config: object, in_generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    config = model_config_from_hf(LLAMA | {"eos_token_id": in_config}, in_generation)
    assert config.eos_token_ids == expected
