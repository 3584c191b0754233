"""The text of one request as its tokens arrive, up to the first stop string."""

from __future__ import annotations

from dataclasses import dataclass

from relaykv.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DetokenizerOutput:
    """What one token added."""

    text: str  # new text that is certain to be part of the answer
    stopped: str | None = None  # the stop string that ended the answer


class Detokenizer:
    """Turns one request's tokens into text that may be sent at once.

    Text is held back while it is half a character or may be the beginning of a stop string.
    The stop string that is complete first in the text ends the answer (of two that end
    together, the longer one), wherever the borders of the tokens are; it and what follows are
    never returned. End-of-turn tokens and stop token ids are the caller's: it does not push
    them, and calls `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        """Raises ValueError when a stop string is empty."""
        self._stream = tokenizer.stream()
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""  # possible beginning of a stop string; shorter than the longest
        self._stopped: str | None = None

    def push(self, token_id: int) -> DetokenizerOutput:
        """Adds a token. After a stop string has matched, nothing more is returned."""
        return self._accept(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for half a character."""
        text = self._accept(self._stream.finish()).text + self._held
        self._held = ""
        return text

    def _accept(self, new: str) -> DetokenizerOutput:
        if self._stopped is not None:
            return DetokenizerOutput("", self._stopped)
        if not self._matchers:
            return DetokenizerOutput(new)
        for index, char in enumerate(new):
            complete = [m.pattern for m in self._matchers if m.advance(char)]
            if complete:
                self._stopped = max(complete, key=len)
                text = (self._held + new[: index + 1]).removesuffix(self._stopped)
                self._held = ""
                return DetokenizerOutput(text, self._stopped)
        text = self._held + new
        num_safe = len(text) - max(m.num_matched for m in self._matchers)
        self._held = text[num_safe:]
        return DetokenizerOutput(text[:num_safe])


class _StopMatcher:
    """Finds one stop string in text that comes character by character (Knuth-Morris-Pratt)."""

    __slots__ = ("_borders", "num_matched", "pattern")

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("a stop string is empty")
        self.pattern = pattern
        self.num_matched = 0  # characters at the end of the text that begin the pattern
        # borders[i]: length of the longest proper prefix of pattern[:i + 1] that also ends it.
        self._borders: list[int] = []
        length = 0
        for index, char in enumerate(pattern):
            if index > 0:
                length = self._extend(length, char)
            self._borders.append(length)

    def advance(self, char: str) -> bool:
        """Takes the next character; True when it completes the pattern. Not to be used after."""
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.pattern)

    def _extend(self, length: int, char: str) -> int:
        while length > 0 and self.pattern[length] != char:
            length = self._borders[length - 1]
        return length + 1 if self.pattern[length] == char else 0
