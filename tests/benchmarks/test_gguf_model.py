from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_model import GgufModelError, convert_qwen2
from safetensors.numpy import load_file
from tiny_gguf import (
    ENDOFTEXT_ID,
    FFN,
    HIDDEN,
    NUM_LAYERS,
    TOKENS,
    tiny_weights,
    write_tiny_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from relaykv.engine.loader import load_model, read_model_config

Q8_0, Q5_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0


def converted(tmp_path: Path, weights: Any = None, **how: Any) -> Path:
    file, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_tiny_gguf(file, tiny_weights() if weights is None else weights, **how)
    convert_qwen2(file, folder)
    return folder


def test_the_engine_loads_the_folder_and_every_weight_is_at_its_place(tmp_path: Path) -> None:
    weights = tiny_weights()
    folder = converted(tmp_path, weights)
    load_model(folder, torch.float16, torch.device("cpu"))  # raises when a name or shape is wrong
    tensors = load_file(folder / "model.safetensors")
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.1.attn_v.bias", "model.layers.1.self_attn.v_proj.bias"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
    ):
        assert np.array_equal(tensors[ours], weights[theirs].astype(np.float16)), ours


def test_the_config_says_what_the_file_says(tmp_path: Path) -> None:
    config = read_model_config(converted(tmp_path))
    assert (config.family, config.num_layers, config.hidden_size) == ("qwen2", NUM_LAYERS, HIDDEN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.intermediate_size, config.vocab_size) == (FFN, len(TOKENS))
    assert (config.rope.theta, config.rms_norm_eps, config.max_model_len) == (1e6, 1e-6, 128)
    assert (config.qkv_bias, config.attention_out_bias) == (True, False)
    assert config.eos_token_ids == (ENDOFTEXT_ID + 2, ENDOFTEXT_ID)


def test_the_weights_are_those_that_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    # An independent reader with a table of names of its own; above all it does not permute
    # queries and keys either. Multiples of 1/16 are the same in fp16.
    weights = {name: np.round(w * 16) / 16 for name, w in tiny_weights().items()}
    folder = converted(tmp_path, weights)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="tiny.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(read) - {"lm_head.weight"}
    for name, weight in ours.items():
        assert np.array_equal(weight.astype(np.float32), read[name].numpy()), name


def test_a_matrix_quantised_twice_is_tied_from_the_output(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["output.weight"] = weights["token_embd.weight"]
    kinds = {"output.weight": Q8_0, "token_embd.weight": Q5_0}
    folder = converted(tmp_path, weights, quantised=kinds)
    tensors = load_file(folder / "model.safetensors")
    fine = dequantize(quantize(weights["output.weight"], Q8_0), Q8_0)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors
    assert np.array_equal(tensors["model.embed_tokens.weight"], fine.astype(np.float16))


def test_an_output_of_its_own_stays_one(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["output.weight"] = tiny_weights(1)["token_embd.weight"]
    folder = converted(tmp_path, weights)
    load_model(folder, torch.float16, torch.device("cpu"))
    assert not read_model_config(folder).tie_word_embeddings
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(head, weights["output.weight"].astype(np.float16))


def test_the_folder_has_a_tokenizer_that_transformers_loads(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "def x"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\ndef x<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>")["input_ids"] == [ENDOFTEXT_ID + 2]
    assert tokenizer.eos_token == "<|im_end|>"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufModelError, match="architecture 'llama'"):
        converted(tmp_path, architecture="llama")


@pytest.mark.parametrize("name", ["blk.1.attn_k.bias", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    weights = tiny_weights()
    del weights[name]
    with pytest.raises(GgufModelError, match=f"tensor {name} is missing"):
        converted(tmp_path, weights)


def test_a_tensor_that_has_no_place_is_named(tmp_path: Path) -> None:
    weights = tiny_weights() | {"blk.0.attn_q_norm.weight": np.ones(16, dtype=np.float32)}
    with pytest.raises(GgufModelError, match=r"unexpected tensor blk\.0\.attn_q_norm\.weight"):
        converted(tmp_path, weights)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["blk.0.attn_k.weight"] = weights["blk.0.attn_q.weight"]
    with pytest.raises(GgufModelError, match=r"attn_k\.weight has shape \(64, 64\), not \(32, 64"):
        converted(tmp_path, weights)


@pytest.mark.parametrize("value", [1e6, float("nan")], ids=["too large", "no number"])
def test_a_weight_that_half_precision_cannot_hold_is_refused(tmp_path: Path, value: float) -> None:
    weights = tiny_weights()
    weights["output_norm.weight"][3] = value
    with pytest.raises(GgufModelError, match=r"output_norm\.weight holds"):
        converted(tmp_path, weights)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model at all" * 10)
    with pytest.raises(GgufModelError, match=r"cannot read x\.gguf"):
        convert_qwen2(tmp_path / "x.gguf", tmp_path / "model")
