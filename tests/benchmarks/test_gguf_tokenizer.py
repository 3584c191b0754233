"""The tokenizer of a GGUF file, rebuilt, splits texts as the one it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from gguf_tokenizer import GgufTokenizerError, qwen2_tokenizer, write_tokenizer
from tiny_gguf import (
    CONTROL,
    TEXTS,
    USER_DEFINED,
    source_model,
    token_list,
    trained_tokenizer,
    write_gguf,
)
from transformers import AutoTokenizer

from relaykv.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    reader = GGUFReader(write_gguf(file, source_model()))
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_it_splits_as_the_original_and_round_trips(text: str, metadata: dict[str, Any]) -> None:
    rebuilt = Tokenizer(qwen2_tokenizer(metadata))
    ids = rebuilt.encode(text)
    assert ids == trained_tokenizer().encode(text).ids
    assert rebuilt.decode(ids) == text


def test_digits_are_single_tokens(metadata: dict[str, Any]) -> None:
    assert qwen2_tokenizer(metadata).encode("2026").tokens == ["2", "0", "2", "6"]


@pytest.mark.parametrize("token", [*CONTROL, *USER_DEFINED])
def test_added_tokens_keep_their_ids_and_are_never_split(
    token: str, metadata: dict[str, Any]
) -> None:
    rebuilt = Tokenizer(qwen2_tokenizer(metadata))
    id_ = token_list(trained_tokenizer()).index(token)
    before, after = rebuilt.encode("x"), rebuilt.encode("y")
    assert rebuilt.encode(f"x{token}y") == [*before, id_, *after]
    assert rebuilt.is_special(id_) == (token in CONTROL)


def test_tokens_that_pad_the_matrices_are_no_part_of_it(metadata: dict[str, Any]) -> None:
    rebuilt = qwen2_tokenizer(metadata)
    assert rebuilt.token_to_id("[PAD1]") is None
    assert rebuilt.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"]) - 2


def test_transformers_reads_the_folder_alike_and_renders_the_template(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(metadata, tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": TEXTS[2]}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|im_start|>user\n{TEXTS[2]}<|im_end|>\n<|im_start|>assistant\n"
    assert theirs(prompt)["input_ids"] == ours.encode(prompt)
    assert theirs.eos_token == "<|im_end|>"
    assert ours.leading_ids == ()
    assert len(theirs) == ours.vocab_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokeniser 'llama-bpe', not qwen2"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' with"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "but 2 token types"),
        ({"tokenizer.ggml.merges": ["a b", "ab"]}, "'ab' is no merge of two tokens"),
        ({"tokenizer.ggml.add_bos_token": True}, "a token in front of every text"),
        ({"tokenizer.chat_template": ""}, "no chat template"),
    ],
    ids=["pattern", "kind", "types", "merge", "bos", "template"],
)
def test_what_cannot_be_rebuilt_is_refused(
    changes: dict[str, Any], message: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(GgufTokenizerError, match=message):
        write_tokenizer({**metadata, **changes}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_field_is_named(metadata: dict[str, Any], tmp_path: Path) -> None:
    rest = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.merges"}
    with pytest.raises(GgufTokenizerError, match=r"the field tokenizer\.ggml\.merges is missing"):
        write_tokenizer(rest, tmp_path)
