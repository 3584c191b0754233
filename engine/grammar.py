"""Constrained decoding: which tokens may follow in an answer that has to fit a grammar."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llguidance

from relaykv.engine.request import GrammarKind, GrammarSpec
from relaykv.engine.tokenizer import Tokenizer

_MAX_COMPILED = 64
_STYLE_KEY = "x-guidance"
# How models write JSON by themselves, and how chat templates write it into a prompt. Free white
# space would let a small model put line breaks until it runs out of tokens.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ValueError):
    """A grammar that is malformed or not supported, or an answer that does not fit its own."""


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The Lark expression for JSON that satisfies a schema.

    Args:
        lenient: leave out what is not supported of the schema, instead of refusing it.
    """
    return f"%json {_styled(schema, lenient)}"


def check_grammar(spec: GrammarSpec) -> None:
    """Compiles a grammar without a tokenizer; takes milliseconds.

    Raises:
        GrammarError: it is malformed, needs what is not supported, or nothing satisfies it.
    """
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_source(spec))
    if is_error:
        raise GrammarError(_one_line(messages[0]))


@dataclass(slots=True)
class _State:
    """Where one request is in its grammar: a cache of what its tokens say."""

    spec: GrammarSpec
    matcher: llguidance.LLMatcher
    token_ids: list[int] = field(default_factory=list)  # that the matcher has taken in


class GrammarMatchers:
    """Says for every constrained request which tokens may be next.

    An answer's state follows from its grammar and its tokens alone. It is kept from one step to
    the next because that is fast, and built again where it is missing or does not fit.
    All but `compile` belongs to the engine thread.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Takes the width of the logits; ids above the tokenizer's are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None  # half a second, so when needed
        self._building = threading.Lock()  # the vocabulary
        self._compiled: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()
        self._changing = threading.Lock()  # what is compiled
        self._states: dict[str, _State] = {}

    def keep(self, request_ids: Collection[str]) -> None:
        """Forgets the states of all other requests."""
        if not self._states.keys() <= set(request_ids):
            self._states = {key: self._states[key] for key in request_ids if key in self._states}

    def mask(self, request_id: str, spec: GrammarSpec, output_token_ids: Sequence[int]) -> bytes:
        """One bit per token of the vocabulary, lowest first: whether it may be next.

        Raises:
            GrammarError: the grammar does not compile, or the tokens do not fit it.
        """
        state = self._states.pop(request_id, None)
        num_known = 0 if state is None else len(state.token_ids)
        if state is None or state.spec != spec or state.token_ids != output_token_ids[:num_known]:
            state, num_known = _State(spec, self.compile(spec).deep_copy()), 0
        new = list(output_token_ids[num_known:])
        if new and not state.matcher.consume_tokens(new):
            raise GrammarError("the answer's tokens do not fit its grammar")
        state.token_ids += new
        mask = state.matcher.compute_bitmask()
        if state.matcher.is_error():
            raise GrammarError(_one_line(state.matcher.get_error()))
        if not mask.strip(b"\0"):
            raise GrammarError("no token of the model's vocabulary fits the grammar here")
        self._states[request_id] = state
        return mask

    def compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        """A matcher at the start of a grammar, to be copied; the latest ones are kept.

        May run in any thread: a large grammar takes a tenth of a second, and the first one of
        all half a second, which would hold up the other requests in the engine thread.

        Raises:
            GrammarError: it does not compile.
        """
        with self._changing:
            matcher = self._compiled.get(spec)
            if matcher is not None:
                self._compiled.move_to_end(spec)
                return matcher
        matcher = llguidance.LLMatcher(self._built_vocabulary(), _source(spec), log_level=0)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        with self._changing:
            self._compiled[spec] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _built_vocabulary(self) -> llguidance.LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-turn token, which a grammar must end with")
        with self._building:
            if self._vocabulary is None:
                wrapper = llguidance.TokenizerWrapper(
                    _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
                )
                self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=self._eos_token_ids)
            return self._vocabulary


class _Vocabulary:
    """A tokenizer in the form that llguidance asks for.

    It gives the bytes that decoding gives, so that a grammar sees the text that clients get.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        ids = range(vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        self.special_token_ids = [id_ for id_ in ids if tokenizer.is_special(id_)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text)


def _source(spec: GrammarSpec) -> str:
    """A grammar in llguidance's own form."""
    if spec.kind is GrammarKind.JSON_SCHEMA:
        lark = f"start: %json {_styled(json.loads(spec.text), False)}"
        return llguidance.LLMatcher.grammar_from_lark(lark)
    return llguidance.LLMatcher.grammar_from_lark(spec.text)


def _styled(schema: Mapping[str, Any], lenient: bool) -> str:
    style = {**_STYLE, "lenient": lenient}
    # Also takes the place of a client's own, which could make the grammar lenient.
    return json.dumps({**schema, _STYLE_KEY: style})


def _one_line(message: str) -> str:
    # The library appends its internal state to some messages.
    return " ".join(message.partition("<state>")[0].split())[:300]
