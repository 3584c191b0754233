"""The tokenizer of a GGUF file as the two files that a Hugging Face model folder has for it.

GGUF holds a byte-level BPE vocabulary, its merges, the kind of every token and the name of the
pre-tokeniser, but not the pre-tokeniser itself: the pattern here is the one that transformers'
`Qwen2Tokenizer` uses for the name "qwen2".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kinds of tokens, from the GGUF specification; unused ones only pad the vocabulary.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


class GgufTokenizerError(ValueError):
    """The file's tokenizer is not one that can be rebuilt; the message says why."""


def qwen2_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer from the fields `tokenizer.ggml.*` of a GGUF file.

    Control tokens become special ones, user-defined tokens (such as `<tool_call>`) plain added
    ones, which decoding shows; both are found in a text before it is split.

    Raises:
        GgufTokenizerError: a field is missing, or names a tokenizer of another kind.
    """
    kind = (_field(metadata, "model"), _field(metadata, "pre"))
    if kind != ("gpt2", "qwen2"):
        raise GgufTokenizerError(f"tokenizer {kind[0]!r} with pre-tokeniser {kind[1]!r}, not qwen2")
    tokens, kinds = _field(metadata, "tokens"), _field(metadata, "token_type")
    if len(tokens) != len(kinds):
        raise GgufTokenizerError(f"{len(tokens)} tokens, but {len(kinds)} token types")
    unknown = set(kinds) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}
    if unknown:
        raise GgufTokenizerError(f"unknown token types {sorted(unknown)}")
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    merges = [_pair(merge) for merge in _field(metadata, "merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    for id_, token in enumerate(tokens):
        if kinds[id_] in (_CONTROL, _USER_DEFINED):
            special = kinds[id_] == _CONTROL
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
            if backend.token_to_id(token) != id_:  # ids are given in order, after the vocabulary's
                raise GgufTokenizerError(f"token {token!r} cannot keep its id {id_}")
    return backend


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the chat template in the second.

    Raises:
        GgufTokenizerError: see `qwen2_tokenizer`; or there is no chat template.
    """
    template = metadata.get("tokenizer.chat_template")
    if not template:
        raise GgufTokenizerError("the file has no chat template")
    backend = qwen2_tokenizer(metadata)
    tokens = _field(metadata, "tokens")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,  # the file names one, and says that none is put before a text
        "eos_token": tokens[_field(metadata, "eos_token_id")],
        "pad_token": tokens[_field(metadata, "padding_token_id")],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("qwen2.context_length"),
        "added_tokens_decoder": {
            str(id_): {
                "content": token.content,
                "special": token.special,
                "normalized": token.normalized,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
            }
            for id_, token in backend.get_added_tokens_decoder().items()
        },
        "chat_template": template,
    }
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise GgufTokenizerError("a token in front of every text is not supported")
    backend.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError as error:
        raise GgufTokenizerError(f"the field {error.args[0]} is missing") from error


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")  # byte-level tokens hold no space
    if not left or not right:
        raise GgufTokenizerError(f"{merge!r} is no merge of two tokens")
    return left, right
