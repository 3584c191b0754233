"""Text to token ids and back, over a Hugging Face fast tokenizer."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a vocabulary spells bytes: the tokenizer's decoder pipeline in four facts."""

    byte_level: bool = False  # every character stands for one byte (GPT-2's alphabet)
    byte_fallback: bool = False  # "<0xE4>" stands for one byte (SentencePiece)
    replacements: tuple[tuple[str, str], ...] = ()  # such as U+2581 to a space
    num_leading_spaces: int = 0  # put before every text when encoding, so dropped in decoding


class Tokenizer:
    """Encodes and decodes. Holds no state, so threads may share it.

    Decoding does not use the backend's decoder but the bytes that each token stands for. Bytes
    can be appended one token at a time, whereas the backend can only decode a list again, and
    its `DecodeStream` keeps an undecodable tail to itself and grows slow on a long one.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises ValueError when the tokenizer's decoder is of an unknown kind."""
        # tokenizer.json may ask for both; they would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = _read_spelling(backend)
        self._byte_of_char = _byte_level_alphabet() if self._spelling.byte_level else {}
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer of a model folder, converting older formats to the fast one.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the folder has no tokenizer that can be read.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"no model folder at {folder}")
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(_convert(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} cannot be read: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be wider (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Special tokens that this tokenizer itself puts in front of a text, such as BOS."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(id_ for id_, _ in itertools.takewhile(lambda entry: entry[1], marked))

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. Special tokens are recognised in it but none are added.

        Raises:
            ValueError: the text holds a lone surrogate and so has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the text holds a lone surrogate") from error
        # Unlike `encode` this lets other threads run all the while: a text may take seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Bytes that are no UTF-8 become U+FFFD; unknown ids are left out."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id_) for id_ in ids if id_ not in skipped)
        text = data.decode("utf-8", errors="replace")
        for _ in range(self._spelling.num_leading_spaces):
            text = text.removeprefix(" ")
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out."""
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """The token alone as text, special tokens spelled out; U+FFFD for half characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; none when the id is outside the vocabulary."""
        if not 0 <= token_id < 2**32:  # the backend's type of ids
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling.byte_level:
            try:
                return bytes(self._byte_of_char[char] for char in token)
            except KeyError:  # an added token, spelled as plain text
                return token.encode()
        if self._spelling.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes.fromhex(token[3:5])
        for old, new in self._spelling.replacements:
            token = token.replace(old, new)
        return token.encode()

    def stream(self) -> TokenStream:
        """A decoder for tokens that arrive one at a time."""
        return TokenStream(self)


class TokenStream:
    """Decodes one continuation incrementally, at a cost per token that does not grow.

    The pieces of text add up to what `Tokenizer.decode` returns for all the ids, except that a
    SentencePiece vocabulary's leading space stays: a continuation of "a" by " b" needs it.
    Special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that the token completes; the bytes of a half one are kept."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD when half a character is left, else nothing."""
        return self._utf8.decode(b"", final=True)


def _convert(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # slow to import, and rarely needed

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # its failures have no common class
        raise ValueError(f"{folder} has no tokenizer.json and no other tokenizer") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"{folder} has a tokenizer that has no fast version")
    return backend


def _read_spelling(backend: tokenizers.Tokenizer) -> _Spelling:
    decoder = backend.decoder
    if decoder is None:
        raise ValueError("the tokenizer has no decoder, so its tokens cannot be joined to text")
    parts = _flatten(json.loads(decoder.__getstate__()))
    kinds = {part["type"] for part in parts}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return _Spelling(byte_level=True)
    replacements: list[tuple[str, str]] = []
    num_leading_spaces = 0
    for part in parts:
        match part:
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                num_leading_spaces += start
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                num_leading_spaces += part.get("prepend_scheme") != "never"
            case _:
                raise ValueError(f"tokenizers that decode with {part['type']} are not supported")
    return _Spelling(
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        num_leading_spaces=num_leading_spaces,
    )


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for child in decoder["decoders"] for part in _flatten(child)]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
