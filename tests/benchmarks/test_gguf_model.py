"""A tiny GGUF file becomes a folder that the engine and transformers read alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_forward import dense_logits
from gguf import GGMLQuantizationType
from gguf_model import GgufModelError, convert_qwen2
from gguf_tokenizer import GgufTokenizerError
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny_gguf import GgufPlan, gguf_tensors, source_model, write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM

from relaykv.engine.loader import load_model, read_model_config

CPU = torch.device("cpu")
IDS = torch.randint(300, (60,), generator=torch.Generator().manual_seed(2))


def converted(folder: Path, plan: GgufPlan | None = None, tied: bool = True) -> Path:
    file = write_gguf(folder / "tiny.gguf", source_model(tied), plan)
    convert_qwen2(file, folder / "model")
    return folder / "model"


@torch.inference_mode()
def source_logits(tied: bool = True) -> Tensor:
    logits: Tensor = source_model(tied)(IDS[None]).logits[0]
    return logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.inference_mode()
def test_engine_and_transformers_give_the_logits_of_the_source(tied: bool, tmp_path: Path) -> None:
    folder = converted(tmp_path, tied=tied)
    expected = source_logits(tied)
    ours = dense_logits(load_model(folder, torch.float32, CPU), IDS.tolist())
    reread = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert expected.abs().max() > 1.0
    assert (ours - expected).abs().max() <= 1e-4
    assert (reread(IDS[None]).logits[0] - expected).abs().max() <= 1e-4
    assert reread.config.tie_word_embeddings == tied


def test_config_holds_what_the_file_says(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    config = read_model_config(folder)
    source = source_model().config
    assert (config.family, config.qkv_bias, config.attention_out_bias) == ("qwen2", True, False)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert config.rms_norm_eps == source.rms_norm_eps == 1e-6
    assert config.rope.theta == source.rope_parameters["rope_theta"]
    assert config.max_model_len == source.max_position_embeddings
    assert config.vocab_size == source.vocab_size
    generation = json.loads((folder / "generation_config.json").read_text())
    turn, text = config.eos_token_ids  # the end of a turn first, then that of a text
    assert generation["eos_token_id"] == [turn, text]
    assert generation["pad_token_id"] == text


@pytest.mark.parametrize(
    ("kind", "levels"), [(GGMLQuantizationType.Q8_0, 127), (GGMLQuantizationType.Q5_0, 16)]
)
def test_every_weight_is_within_its_quantisation_step_of_the_source(
    kind: GGMLQuantizationType, levels: int, tmp_path: Path
) -> None:
    tensors = gguf_tensors(source_model())
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    folder = converted(tmp_path, GgufPlan(quantised=dict.fromkeys(matrices, kind)))
    state = source_model().state_dict()
    del state["lm_head.weight"]  # the embedding once more
    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    for name, expected in state.items():
        error = (found[name].float() - expected).abs()
        if expected.ndim == 1:
            assert error.max() == 0
            continue
        blocks = expected.reshape(-1, 32).abs().amax(-1)  # of 32 weights with one scale
        assert (error.reshape(-1, 32).amax(-1) <= 1.02 * blocks / levels).all(), name
        assert error.max() > 0


def test_of_two_quantisations_of_one_matrix_the_output_is_kept_for_both(tmp_path: Path) -> None:
    embedding = gguf_tensors(source_model())["token_embd.weight"]
    plan = GgufPlan(
        quantised={"token_embd.weight": GGMLQuantizationType.Q5_0},
        tensors={"output.weight": embedding},
    )
    folder = converted(tmp_path, plan)
    assert read_model_config(folder).tie_word_embeddings
    logits = dense_logits(load_model(folder, torch.float32, CPU), IDS.tolist())
    assert (logits - source_logits()).abs().max() <= 1e-4


def of_shape(*shape: int, value: float = 0.5) -> NDArray[np.float32]:
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (GgufPlan(architecture="llama"), "architecture 'llama'; only 'qwen2'"),
        (GgufPlan(tensors={"blk.1.attn_k.bias": None}), "tensor blk.1.attn_k.bias is missing"),
        (GgufPlan(tensors={"blk.0.ffn_x.weight": of_shape(2)}), "unexpected tensor blk.0.ffn_x"),
        (
            GgufPlan(tensors={"blk.2.attn_v.weight": of_shape(64, 64)}),
            re.escape("blk.2.attn_v.weight has shape (64, 64), not (32, 64)"),
        ),
        (
            GgufPlan(tensors={"output_norm.weight": of_shape(64, value=1e6)}),
            "output_norm.weight holds 1000000.0, which fp16 cannot",
        ),
        (
            GgufPlan(tensors={"output_norm.weight": of_shape(64, value=float("nan"))}),
            "output_norm.weight holds nan",
        ),
    ],
    ids=["architecture", "missing", "unexpected", "shape", "too large", "nan"],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    plan: GgufPlan, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufModelError, match=message):
        converted(tmp_path, plan)
    assert not (tmp_path / "model").exists()


def test_a_file_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufTokenizerError, match="no chat template"):
        converted(tmp_path, GgufPlan(template=""))


@pytest.mark.parametrize("content", [b"", b"not a model at all, but text of some length"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(content)
    with pytest.raises(GgufModelError, match=r"cannot read other\.gguf"):
        convert_qwen2(file, tmp_path / "model")
