"""A GGUF file of the qwen2 architecture as a Hugging Face model folder with dense weights.

Tensors are read and dequantised by the `gguf` package. llama.cpp's converter reorders the rows of
queries and keys for the llama architecture only, so qwen2's stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from gguf_tokenizer import write_tokenizer
from numpy.typing import NDArray
from safetensors.numpy import save_file

# One part of a layer's name in GGUF, and in transformers' Qwen2ForCausalLM.
_LAYER_NAMES = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Above this relative distance the two are not the same matrix in two quantisations.
_MAX_TIED_DISTANCE = 0.1


class GgufModelError(ValueError):
    """The file is not a model that can be converted; the message says why."""


def convert_qwen2(file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (fp16) and the tokenizer.

    A file that quantises one matrix twice, as the embedding and as the output, becomes a model
    with tied weights, from the output's, which is the finer quantisation of the two.

    Args:
        folder: is made; must not exist.

    Raises:
        GgufModelError: another architecture, a field or tensor that is missing, unknown or of the
            wrong shape, or a weight that fp16 cannot hold.
        GgufTokenizerError: the tokenizer cannot be rebuilt.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise GgufModelError(f"cannot read {file.name}: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, _is_tied(tensors))
    weights: dict[str, NDArray[np.float16]] = {}
    for name, (source, shape) in _sources(config, _HEAD in tensors).items():
        if source not in tensors:
            raise GgufModelError(f"tensor {source} is missing")
        weights[name] = _weight(tensors.pop(source), shape)
    leftover = sorted(set(tensors) - {_EMBEDDING})
    if leftover:
        raise GgufModelError(f"unexpected tensor {leftover[0]}")
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    write_tokenizer(metadata, folder)


def _is_tied(tensors: Mapping[str, ReaderTensor]) -> bool:
    """Whether the output matrix is the embedding: left out, or quantised a second time."""
    if _HEAD not in tensors:
        return True
    if _EMBEDDING not in tensors or tuple(tensors[_HEAD].shape) != tuple(tensors[_EMBEDDING].shape):
        return False
    rows = slice(None, None, 64)  # a sample is enough to tell
    head, embedding = (_dense(tensors[name], rows) for name in (_HEAD, _EMBEDDING))
    distance = np.linalg.norm(head - embedding) / max(float(np.linalg.norm(head)), 1e-30)
    return bool(distance <= _MAX_TIED_DISTANCE)


def _config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "qwen2":
        raise GgufModelError(f"architecture {architecture!r}; only 'qwen2' is converted")
    scaling = metadata.get("qwen2.rope.scaling.type", "none")
    if scaling != "none":
        raise GgufModelError(f"rope scaling {scaling!r} is not converted")

    def field(name: str) -> Any:
        value = metadata.get(name)
        if value is None:
            raise GgufModelError(f"the field {name} is missing")
        return value

    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": field("qwen2.embedding_length"),
        "intermediate_size": field("qwen2.feed_forward_length"),
        "max_position_embeddings": field("qwen2.context_length"),
        "num_attention_heads": field("qwen2.attention.head_count"),
        "num_hidden_layers": field("qwen2.block_count"),
        "num_key_value_heads": field("qwen2.attention.head_count_kv"),
        # Written as single precision; the shortest decimal of it is what was meant.
        "rms_norm_eps": float(str(np.float32(field("qwen2.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(field("qwen2.rope.freq_base")),
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    # Qwen pads with the token that ends a text of the base model; it ends an answer as well.
    turn = metadata["tokenizer.ggml.eos_token_id"]
    text = metadata.get("tokenizer.ggml.padding_token_id", turn)
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": list(dict.fromkeys((turn, text))),
        "pad_token_id": text,
    }


def _sources(config: Mapping[str, Any], has_head: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor to write: its name in the GGUF file, and its shape."""
    d, f = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"attn_k": (kv, d), "attn_v": (kv, d), "attn_q": (d, d), "attn_output": (d, d)}
    shapes |= {"ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    vocab = (config["vocab_size"], d)
    tied = config["tie_word_embeddings"]
    sources: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (_HEAD if tied and has_head else _EMBEDDING, vocab),
        "model.norm.weight": ("output_norm.weight", (d,)),
    }
    if not tied:
        sources["lm_head.weight"] = (_HEAD, vocab)
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LAYER_NAMES:
            module, _, kind = theirs.partition(".")
            shape: tuple[int, ...] = shapes.get(module, (d,))
            if kind == "bias":
                shape = shape[:1]
            sources[f"model.layers.{layer}.{ours}"] = (f"blk.{layer}.{theirs}", shape)
    return sources


def _dense(tensor: ReaderTensor, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Rows of a tensor, [out, in] or [out], in fp32."""
    try:
        dense: NDArray[np.float32] = dequantize(tensor.data[rows], tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise GgufModelError(f"tensor {tensor.name} is of the type {kind}") from error
    return dense


def _weight(tensor: ReaderTensor, shape: tuple[int, ...]) -> NDArray[np.float16]:
    dense = _dense(tensor)
    if dense.shape != shape:
        raise GgufModelError(f"tensor {tensor.name} has shape {dense.shape}, not {shape}")
    largest = float(np.abs(dense).max())
    if not largest <= float(np.finfo(np.float16).max):  # NaN is not either
        raise GgufModelError(f"tensor {tensor.name} holds {largest}, which fp16 cannot")
    return dense.astype(np.float16)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
