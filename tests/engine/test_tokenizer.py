"""Text to ids and back, one token at a time and at once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from relaykv.engine.tokenizer import Tokenizer, TokenStream

_TEXTS = (
    "",
    " ",
    "  Hello, world!  ",
    "line one\r\nline two\r\n\r\n\tindented\n",
    "emoji \U0001f389\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea and \u2764\ufe0f",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "e\u0301 n\u0303 a\u0308\u0323 \u0639\u0631\u0628\u064a",
    "a replacement \ufffd character, \x00 and \u2028",
)


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXTS * 3, trainer)
    backend.add_tokens(["<tool \u00e9>", AddedToken("<think>", special=False)])
    return backend


@pytest.fixture(scope="module")
def tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: U+2581 for spaces, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdehlorw", "\u4f60"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def _streamed(stream: TokenStream, ids: list[int]) -> str:
    return "".join(stream.push(token_id) for token_id in ids) + stream.finish()


@pytest.mark.parametrize("text", _TEXTS)
def test_text_survives_encoding_at_once_and_streamed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert _streamed(tokenizer.stream(), ids) == text


def test_any_ids_decode_as_the_library_decodes_them(
    backend: tokenizers.Tokenizer, tokenizer: Tokenizer
) -> None:
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(40)]
        expected = backend.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == expected
        assert _streamed(tokenizer.stream(), ids) == expected
        assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(
            ids, skip_special_tokens=False
        )


def test_any_bytes_decode_as_the_library_decodes_them(
    backend: tokenizers.Tokenizer, tokenizer: Tokenizer
) -> None:
    # Lead bytes, continuations and the borders of what UTF-8 allows, in every order of four.
    samples = [0x41, 0x80, 0x8F, 0x90, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xFF]
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in samples]
    rng = random.Random(6)
    for _ in range(2000):
        chosen = rng.choices(ids, k=4)
        assert _streamed(tokenizer.stream(), chosen) == backend.decode(chosen)


def test_half_a_character_is_kept_until_it_is_whole(tokenizer: Tokenizer) -> None:
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in "\U0001f9a9".encode()]
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "\U0001f9a9"]
    assert stream.finish() == ""
    cut = tokenizer.stream()
    assert [cut.push(token_id) for token_id in ids[:3]] == ["", "", ""]
    assert cut.finish() == "\ufffd"


def test_special_tokens_are_recognised_and_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert len(ids) == 5
    assert tokenizer.is_special(ids[0])
    assert not tokenizer.is_special(ids[2])
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b<|im_end|>"
    assert _streamed(tokenizer.stream(), ids) == "a<think>b"
    assert tokenizer.token_text(ids[0]) == "<|im_start|>"


def test_leading_tokens_are_those_the_tokenizer_itself_would_add(
    backend: tokenizers.Tokenizer, tokenizer: Tokenizer
) -> None:
    assert tokenizer.leading_ids == ()
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    assert Tokenizer(copy).leading_ids == (0,)


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in _TEXTS:
        pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
        assert b"".join(pieces) == text.encode()


def test_ids_outside_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size + 10, 2**32, 2**70):
        assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([-1, *tokenizer.encode("a"), 2**70]) == "a"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("half an emoji \ud83d")


def test_truncation_and_padding_of_the_file_are_not_obeyed(
    backend: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "Hello, world! " * 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
    backend.no_truncation()
    backend.no_padding()


def test_sentencepiece_text_survives_and_a_continuation_keeps_its_space(
    sentencepiece: Tokenizer,
) -> None:
    for text in ("hello world", " a  b", "\u4f60\u597d \U0001f389", "\u00e9\r\n"):
        ids = sentencepiece.encode(text)
        assert sentencepiece.decode(ids) == text
        assert _streamed(sentencepiece.stream(), ids) == " " + text


def test_sentencepiece_bytes_are_put_together_and_broken_ones_replaced(
    sentencepiece: Tokenizer,
) -> None:
    ids = [3 + byte for byte in b"a\xe5\xa5\xbd\xe5"]
    stream = sentencepiece.stream()
    assert [stream.push(token_id) for token_id in ids] == ["a", "", "", "\u597d", ""]
    assert stream.finish() == "\ufffd"
    assert sentencepiece.token_bytes(ids[1]) == b"\xe5"


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("hello \U0001f389")
    assert ids[0] == vocab["he"]
    assert tokenizer.decode(ids) == "hello \U0001f389"


def test_folders_without_a_readable_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model folder"):
        Tokenizer.from_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no other tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_unknown_decoders_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="has no decoder"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend)
