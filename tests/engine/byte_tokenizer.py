"""A real tokenizer whose tokens are single bytes, and some longer ones that no text encodes to."""

from __future__ import annotations

import tokenizers
from tokenizers import models, pre_tokenizers

from relaykv.engine.tokenizer import Tokenizer

EOS = "<|im_end|>"
EOS_ID = 2
_LONGER = ('{"', '":', '": ', '"}', "true", "\u01201", "12")  # in GPT-2's alphabet


def byte_tokenizer(ascii_only: bool = False) -> Tokenizer:
    """Tokens: unknown, begin, end of turn, then the bytes in GPT-2's alphabet."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if ascii_only:
        printable = "".join(map(chr, range(32, 127)))
        alphabet = sorted(spelled.pre_tokenize_str(printable)[0][0])
    names = ["<unk>", "<s>", EOS, *alphabet, *_LONGER]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    single = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([spelled, single])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", EOS])
    return Tokenizer(backend)
