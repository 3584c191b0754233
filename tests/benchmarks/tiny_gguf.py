"""A small GGUF file of the qwen2 architecture, as llama.cpp's converter and quantiser write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["d e", "de f", "Ġ x", "1 2", "Ċ Ċ"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool_call>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HIDDEN, FFN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 64, 96, 2, 4, 2
ENDOFTEXT_ID = len(ALPHABET) + len(MERGES)
# Tokens of kind 5, "unused", fill the vocabulary up.
NUM_UNUSED = 4
TOKENS = [
    *ALPHABET,
    *(merge.replace(" ", "") for merge in MERGES),
    *CONTROL,
    USER_DEFINED,
    *(f"[PAD{i}]" for i in range(NUM_UNUSED)),
]
KINDS = [1] * ENDOFTEXT_ID + [3] * len(CONTROL) + [4] + [5] * NUM_UNUSED


def tokenizer_metadata() -> dict[str, Any]:
    """The fields that a tokenizer is rebuilt from."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": list(KINDS),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": ENDOFTEXT_ID,
        "tokenizer.ggml.eos_token_id": ENDOFTEXT_ID + 2,
        "tokenizer.ggml.padding_token_id": ENDOFTEXT_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor under its name in GGUF, [out, in] or [out]; without an output matrix."""
    random = np.random.default_rng(seed)
    kv = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in (
                ("attn_norm.weight", (HIDDEN,)),
                ("attn_q.weight", (HIDDEN, HIDDEN)),
                ("attn_q.bias", (HIDDEN,)),
                ("attn_k.weight", (kv, HIDDEN)),
                ("attn_k.bias", (kv,)),
                ("attn_v.weight", (kv, HIDDEN)),
                ("attn_v.bias", (kv,)),
                ("attn_output.weight", (HIDDEN, HIDDEN)),
                ("ffn_norm.weight", (HIDDEN,)),
                ("ffn_gate.weight", (FFN, HIDDEN)),
                ("ffn_up.weight", (FFN, HIDDEN)),
                ("ffn_down.weight", (HIDDEN, FFN)),
            )
        }
    return {
        name: (random.standard_normal(shape) * (0.3 if len(shape) == 2 else 1.0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_tiny_gguf(
    path: Path,
    weights: dict[str, NDArray[np.float32]],
    architecture: str = "qwen2",
    quantised: dict[str, GGMLQuantizationType] | None = None,
) -> None:
    """Writes the file.

    Args:
        weights: by their names in GGUF.
        quantised: types of the tensors that are not stored in fp32.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_context_length(128)
    writer.add_block_count(NUM_LAYERS)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    fields = tokenizer_metadata()
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    writer.add_pad_token_id(fields["tokenizer.ggml.padding_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        kind = (quantised or {}).get(name)
        if kind is None:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
