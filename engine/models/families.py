"""From a parsed config.json to a `ModelConfig`, or a refusal that names what is not supported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relaykv.engine.config import ModelConfig, RopeConfig


class UnsupportedModelError(ValueError):
    """The model is of a kind that is not served; the message names the reason."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config.json of this family leaves out because transformers has a default for it."""

    name: str
    default_max_len: int
    default_num_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_heads
    default_sliding_window: int | None = None
    optional_sliding_window: bool = False  # the window counts only with use_sliding_window
    always_qkv_bias: bool = False
    bias_from_config: bool = False  # attention_bias is read, for qkv and for the output
    qk_norm: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", 2048, bias_from_config=True),
    "Qwen2ForCausalLM": _Family(
        "qwen2", 32768, 32, optional_sliding_window=True, always_qkv_bias=True
    ),
    "Qwen3ForCausalLM": _Family(
        "qwen3", 32768, 32, 128, optional_sliding_window=True, bias_from_config=True, qk_norm=True
    ),
    "MistralForCausalLM": _Family("mistral", 131072, 8, default_sliding_window=4096),
}


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Reads the parsed config.json and generation_config.json of a Hugging Face model folder.

    A sliding window shorter than the context caps `max_model_len` to the window, so that no
    position ever lies behind it; a warning is logged then.

    Raises:
        UnsupportedModelError: the architecture, rope scaling, quantisation or another feature
            is not supported, or a field that has no default is missing.
    """
    family = _family(config)
    _refuse_unsupported(config, family)
    num_heads = _int(config, "num_attention_heads")
    hidden_size = _int(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads", family.default_num_kv_heads) or num_heads
    head_dim = config.get("head_dim") or family.default_head_dim or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads"
        )
    attention_bias = family.bias_from_config and bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family.name,
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_layers=_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=_max_model_len(config, family),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_config(config, family, head_dim),
        qkv_bias=family.always_qkv_bias or attention_bias,
        qk_norm=family.qk_norm,
        attention_out_bias=attention_bias,
        mlp_bias=family.name == "llama" and bool(config.get("mlp_bias", False)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(config, generation_config or {}),
    )


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type", ""))
    named = config.get("architectures") or ()
    if not named:  # a bare config: the model type decides
        named = [name for name, family in _FAMILIES.items() if family.name == model_type]
    for name in named:
        if name in _FAMILIES:
            return _FAMILIES[name]
    what = named[0] if named else model_type or "config.json without architectures"
    raise UnsupportedModelError(
        f"unsupported architecture {what!r}; supported: {', '.join(_FAMILIES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any], family: _Family) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantised weights are not supported (quant_method {method})")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(field):
            raise UnsupportedModelError(f"mixture of experts is not supported ({field})")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"unsupported activation {activation!r}; supported: silu")
    foreign = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModelError(f"unsupported layer types {sorted(foreign)} ({family.name})")


def _max_model_len(config: Mapping[str, Any], family: _Family) -> int:
    max_len = int(config.get("max_position_embeddings", family.default_max_len))
    window = config.get("sliding_window", family.default_sliding_window)
    if family.optional_sliding_window and not config.get("use_sliding_window", False):
        window = None
    if window is None or window >= max_len:
        if "sliding_attention" in (config.get("layer_types") or ()) and window is None:
            raise UnsupportedModelError("sliding_attention layers without a sliding_window")
        return max_len
    if window < 1:
        raise UnsupportedModelError(f"sliding_window {window} is not positive")
    logging.getLogger(__name__).warning(
        "sliding window of %d tokens: the context is capped to it (the model allows %d)",
        window,
        max_len,
    )
    return int(window)


def _rope_config(config: Mapping[str, Any], family: _Family, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(f"rope parameters per layer type ({family.name})")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"unsupported partial_rotary_factor {partial}")
    if head_dim % 2:
        raise UnsupportedModelError(f"odd head size {head_dim} cannot be rotated")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    if rope_type != "llama3":
        raise UnsupportedModelError(f"unsupported rope type {rope_type!r}; supported: llama3")
    try:
        return RopeConfig(
            theta=theta,
            rotary_dim=head_dim,
            llama3_factor=float(rope["factor"]),
            llama3_low_freq_factor=float(rope["low_freq_factor"]),
            llama3_high_freq_factor=float(rope["high_freq_factor"]),
            llama3_original_max_len=int(
                rope.get("original_max_position_embeddings")
                or config.get("max_position_embeddings")
                or family.default_max_len
            ),
        )
    except KeyError as error:
        raise UnsupportedModelError(f"rope type 'llama3' without {error.args[0]}") from error


def _eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The ids of both files, each once, config.json's first."""
    ids: list[int] = []
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _int(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json needs a positive {field}, not {value!r}")
    return value
