"""Text as it is sent: held back no longer than needed, ended before the first stop string."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from relaykv.engine.detokenizer import Detokenizer
from relaykv.engine.tokenizer import Tokenizer

_TEXT = (
    "  The \U0001f389 party\r\nof \u4f60\u597d and e\u0301 went on.\n\nUser: stop? STOP\n"
    "\U0001f469\u200d\U0001f680 \u3053\u3093\u306b\u3061\u306f ababababc end"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    return Tokenizer(backend)


def _run(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    text = ""
    for token_id in ids:
        output = detokenizer.push(token_id)
        text += output.text
        if output.stopped is not None:
            return text, output.stopped
    return text + detokenizer.finish(), None


def _oracle(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _random_split(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Token ids of the text with borders in other places than the tokenizer would choose."""
    ids: list[int] = []
    while text:
        length = rng.randint(1, 6)
        ids += tokenizer.encode(text[:length])
        text = text[length:]
    return ids


def test_deltas_add_up_to_the_text_of_real_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(50):
        assert _run(tokenizer, _random_split(tokenizer, _TEXT, rng)) == (_TEXT, None)


def test_deltas_add_up_to_the_text_of_random_ids_with_and_without_stops(
    tokenizer: Tokenizer,
) -> None:
    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        text = tokenizer.decode(ids)
        assert _run(tokenizer, ids) == (text, None)
        stop = ("e", "\ufffd\ufffd", "to")
        assert _run(tokenizer, ids, stop)[0] == _oracle(text, stop)[0]


@pytest.mark.parametrize(
    "stop",
    [
        ("User:",),
        ("\n\nUser:", "\r\n"),
        ("STOP", "stop"),
        ("ababc",),
        ("abababab", "babc"),
        ("\U0001f680",),
        ("\u0301 went on.\n", "never"),
        ("party", "party\r\n", "art"),
        ("n", "on"),
        ("not in it",),
        (" end of",),
    ],
)
def test_the_first_complete_stop_string_ends_the_text_wherever_tokens_end(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    rng = random.Random(3)
    for _ in range(30):
        ids = _random_split(tokenizer, _TEXT, rng)
        assert _run(tokenizer, ids, stop) == _oracle(_TEXT, stop)


def test_stop_strings_over_a_small_alphabet_agree_with_the_oracle(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=20))
        stop = tuple("".join(rng.choices("ab", k=rng.randint(2, 7))) for _ in range(3))
        ids = _random_split(tokenizer, text, rng)
        assert _run(tokenizer, ids, stop) == _oracle(text, stop)


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("##END",))
    ids = [token_id for char in "a##E#b" for token_id in tokenizer.encode(char)]
    assert [detokenizer.push(token_id).text for token_id in ids] == ["a", "", "", "", "##E", "#b"]
    assert detokenizer.finish() == ""


def test_finish_releases_what_was_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("##END",))
    text = "".join(detokenizer.push(token_id).text for token_id in tokenizer.encode("a##EN"))
    assert text == "a"
    assert detokenizer.finish() == "##EN"
    assert detokenizer.finish() == ""


def test_half_a_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(byte_ids[b"\xf0"]).text == ""
    assert detokenizer.push(byte_ids[b"\x9f"]).text == ""
    assert detokenizer.finish() == "\ufffd"


def test_nothing_is_returned_after_a_stop(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("!",))
    outputs = [detokenizer.push(token_id) for token_id in tokenizer.encode("a!b") * 2]
    assert "".join(output.text for output in outputs) == "a"
    assert outputs[-1].stopped == "!"
    assert detokenizer.finish() == ""


def test_special_tokens_are_skipped_and_spaces_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("  a <|im_end|> b ")
    assert _run(tokenizer, ids) == ("  a  b ", None)
    assert _run(tokenizer, ids, ("a  b",)) == ("  ", "a  b")


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        Detokenizer(tokenizer, ("",))


@pytest.mark.parametrize("kind", ["text", "broken bytes", "nearly a stop string"])
def test_the_work_for_a_token_does_not_grow_with_the_output(
    tokenizer: Tokenizer, kind: str
) -> None:
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    unit = {
        "text": tokenizer.encode(_TEXT),
        "broken bytes": [byte_ids[b"\xf0"], byte_ids[b"\x9f"]],
        "nearly a stop string": [byte_ids[b"a"]],
    }[kind]
    detokenizer = Detokenizer(tokenizer, ("a" * 50 + "b", "never"))
    num_repeats = 4000 // len(unit)
    lines = [
        sum(_count_lines(detokenizer, token_id) for token_id in unit) for _ in range(num_repeats)
    ]
    num_settling = 100  # the first near misses are shorter than the stop string
    assert max(lines[-num_settling:]) <= max(lines[:num_settling])
    assert len(detokenizer.finish()) <= 51


def _count_lines(detokenizer: Detokenizer, token_id: int) -> int:
    """Python lines run by one push, an exact measure that no busy machine can disturb."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        detokenizer.push(token_id)
    finally:
        sys.settrace(before)
    return count
