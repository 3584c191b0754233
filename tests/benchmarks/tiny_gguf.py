"""A tiny qwen2 model as a GGUF file, with a byte-level tokenizer trained on a few texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

TEXTS = (
    "def reverse(text: str) -> str:\n    return text[::-1]\n\n\n",
    "don't I'LL we've 12,345.67\r\n\t  trailing   ",
    "na\u00efve \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f642",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \x00\ufffd",
    "",
    " ",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KINDS = gguf.TokenType
# GGUF's name of every tensor of a layer; transformers calls it the second.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """What the file is to hold instead of, or beside, what belongs in it."""

    architecture: str = "qwen2"
    pre_tokenizer: str = "qwen2"
    template: str = TEMPLATE
    quantised: Mapping[str, GGMLQuantizationType] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[np.float32] | None] = field(
        default_factory=dict
    )  # None: left out


def trained_tokenizer() -> Tokenizer:
    """The pre-tokeniser is transformers' own; nothing is added to the vocabulary yet."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def token_list(backend: Tokenizer) -> list[str]:
    """Its vocabulary, the added tokens and two that pad the matrices."""
    plain = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return [*plain, *CONTROL, *USER_DEFINED, "[PAD1]", "[PAD2]"]


def source_model(tied: bool = True) -> PreTrainedModel:
    """Random weights that fp16 holds exactly, one row of the embedding for every token."""
    model = tiny_model("qwen2", tied, len(token_list(trained_tokenizer())))
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay in fp32
        parameter.data = parameter.data.half().float()
    return model


def gguf_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """Its weights under GGUF's names; a tied model has no output matrix."""
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in _LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                name = f"model.layers.{layer}.{ours}.{kind}"
                if name in state:
                    tensors[f"blk.{layer}.{theirs}.{kind}"] = state[name]
    return tensors


def write_gguf(path: Path, model: PreTrainedModel, plan: GgufPlan | None = None) -> Path:
    """Writes the model and returns the path."""
    plan = plan or GgufPlan()
    writer = gguf.GGUFWriter(path, plan.architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, plan)
    tensors = {**gguf_tensors(model), **plan.tensors}
    for name, tensor in tensors.items():
        if tensor is not None:
            kind = plan.quantised.get(name, GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, plan: GgufPlan) -> None:
    backend = trained_tokenizer()
    tokens = token_list(backend)
    kinds = [_KINDS.NORMAL] * backend.get_vocab_size() + [_KINDS.CONTROL] * len(CONTROL)
    kinds += [_KINDS.USER_DEFINED] * len(USER_DEFINED)
    kinds += [_KINDS.UNUSED] * (len(tokens) - len(kinds))
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(plan.pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    if plan.template:
        writer.add_chat_template(plan.template)
