from __future__ import annotations

import unicodedata

import pytest
from gguf_tokenizer import GgufTokenizerError, qwen2_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import CONTROL, ENDOFTEXT_ID, NUM_UNUSED, TOKENS, USER_DEFINED, tokenizer_metadata
from transformers.models.qwen2 import tokenization_qwen2

from relaykv.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(qwen2_tokenizer(tokenizer_metadata()))


def tokens(text: str) -> list[str]:
    return [TOKENS[id_] for id_ in TOKENIZER.encode(text)]


@given(st.text())
def test_every_text_comes_back_in_normal_form(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_merges_apply_within_pieces_only() -> None:
    assert tokens("def x") == ["def", "Ġx"]
    assert tokens("ab\n\ncd") == ["a", "b", "ĊĊ", "c", "d"]
    assert tokens("12") == ["1", "2"]  # Qwen splits every digit off, although there is a merge


def test_the_pattern_is_that_of_transformers() -> None:
    backend = qwen2_tokenizer(tokenizer_metadata())
    pieces = backend.pre_tokenizer.pre_tokenize_str("I've 2 cats;\r\n  don't  ask")
    text = "I've 2 cats;\r\n  don't  ask"
    assert [text[start:end] for _, (start, end) in pieces] == [
        *("I", "'ve", " ", "2", " cats", ";\r\n", " ", " don", "'t", " ", " ask")
    ]
    assert tokenization_qwen2.PRETOKENIZE_REGEX in backend.to_str().encode().decode(
        "unicode_escape"
    )


def test_control_tokens_are_single_and_special() -> None:
    for index, token in enumerate(CONTROL):
        ids = TOKENIZER.encode(f"a{token}b")
        assert ids[1:-1] == [ENDOFTEXT_ID + index]
        assert TOKENIZER.is_special(ids[1])
        assert TOKENIZER.decode(ids) == "ab"


def test_user_defined_tokens_are_single_and_shown() -> None:
    ids = TOKENIZER.encode(f"a{USER_DEFINED}b")
    assert ids[1:-1] == [ENDOFTEXT_ID + len(CONTROL)]
    assert TOKENIZER.decode(ids) == f"a{USER_DEFINED}b"


def test_unused_tokens_are_left_out() -> None:
    assert TOKENIZER.vocab_size == len(TOKENS) - NUM_UNUSED
    assert len(TOKENIZER.encode("[PAD0]")) == 6


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "llama", "tokenizer 'llama'"),
        ("pre", "smollm", "pre-tokeniser 'smollm'"),
        ("token_type", [1], "1 token types"),
        ("token_type", [2] * len(TOKENS), r"unknown token types \[2\]"),
        ("merges", ["ab"], "'ab' is no merge"),
        ("tokens", [CONTROL[0], *TOKENS[1:]], "cannot keep its id"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(field: str, value: object, message: str) -> None:
    metadata = tokenizer_metadata() | {f"tokenizer.ggml.{field}": value}
    with pytest.raises(GgufTokenizerError, match=message):
        qwen2_tokenizer(metadata)


def test_a_missing_field_is_named() -> None:
    metadata = tokenizer_metadata()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(GgufTokenizerError, match=r"tokenizer\.ggml\.merges is missing"):
        qwen2_tokenizer(metadata)
