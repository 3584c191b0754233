"""The real second model, where `make second-model` has put it: nothing is downloaded for it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_forward import dense_logits
from second_model import NAME, SOURCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaykv.engine.loader import load_model, read_model_config
from relaykv.engine.model_store import cache_home
from relaykv.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

_CODE = '''def quicksort(items):
    """Sorts a list."""
    if len(items) <= 1:
        return items
    pivot, rest = items[0], items[1:]
    left = [x for x in rest if x < pivot]
    right = [x for x in rest if x >= pivot]
    return quicksort(left) + [pivot] + quicksort(right)
'''
_TEXTS = (
    _CODE,
    "\t\ttabs\r\nCR LF  \n  trailing   ",
    "1234567890 12,345.67 don't I'LL we've",
    "e\u0301 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f469\u200d\U0001f467 \u0939\u093f\u0928",
    "<|im_start|>user\n<tool_call>\n{}\n</tool_call><|im_end|>\n",
    "",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    path = cache_home() / "models" / NAME
    marker = path / "source.txt"
    if not marker.is_file() or marker.read_text(encoding="ascii") != SOURCE:
        pytest.skip("`make second-model` has not run")
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' tokenizer of the same folder."""
    return AutoTokenizer.from_pretrained(folder)


def test_the_config_is_that_of_the_published_model(folder: Path) -> None:
    config = read_model_config(folder)
    assert (config.family, config.num_layers, config.hidden_size) == ("qwen2", 24, 896)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (14, 2, 64)
    assert (config.rope.theta, config.rms_norm_eps) == (1e6, 1e-6)
    assert (config.qkv_bias, config.tie_word_embeddings) == (True, True)
    assert config.eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("text", _TEXTS)
def test_texts_are_split_as_transformers_does_and_come_back_normalised(
    text: str, ours: Tokenizer, theirs: Any
) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("token", "id_", "special"),
    [
        ("<|endoftext|>", 151643, True),
        ("<|im_start|>", 151644, True),
        ("<|im_end|>", 151645, True),
        ("<tool_call>", 151657, False),  # a client reads it: decoding must not leave it out
        ("</tool_call>", 151658, False),
    ],
)
def test_tokens_of_the_chat_template_are_single(
    token: str, id_: int, special: bool, ours: Tokenizer
) -> None:
    assert ours.encode(token) == [id_]
    assert ours.is_special(id_) == special


def test_the_template_has_a_default_system_message_and_tools(theirs: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    plain = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = theirs.apply_chat_template(messages, tokenize=False, tools=[tool])
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text


@torch.inference_mode()
def test_logits_equal_transformers_and_rows_are_in_its_order(folder: Path, ours: Tokenizer) -> None:
    ids = ours.encode(_CODE)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(torch.tensor([ids])).logits[0]  # [n, vocab]
    del reference
    logits = dense_logits(load_model(folder, torch.float32, torch.device("cpu")), ids)
    assert (logits - expected).abs().max() <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    # Reordered queries and keys, as llama's are in GGUF, would leave the text hard to predict.
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    assert loss < 1.5
