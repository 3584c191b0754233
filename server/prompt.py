"""Messages or text to token ids, beside the event loop."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from relaykv.server.chat_template import ChatTemplate, template_message
from relaykv.server.errors import bad_request
from relaykv.server.protocol import ChatMessage
from relaykv.server.tool_form import ToolForm
from relaykv.server.tool_prompt import plain_messages

Result = TypeVar("Result")


class ServerTokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Control tokens the model expects in front of a text that no template has rendered."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, control tokens in it included, none added."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; they need not be whole characters."""
        ...


class PromptBuilder:
    """Renders and tokenises in a small pool of threads of its own."""

    def __init__(
        self, template: ChatTemplate, tokenizer: ServerTokenizer, num_threads: int = 2
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="relaykv-prompt")
        forgeable = (re.escape(token) for token in template.special_tokens if len(token) > 1)
        alternatives = "|".join(forgeable)
        self._forgeable = re.compile(alternatives) if alternatives else None

    @property
    def tokenizer(self) -> ServerTokenizer:
        return self._tokenizer

    @property
    def tool_form(self) -> ToolForm:
        """How the model calls tools."""
        return self._template.tool_form

    async def from_messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation, the start of the next assistant turn included.

        Args:
            tools: definitions of those that are offered, in OpenAI's form.

        Raises:
            ApiError: 400 with the template's reason when it refuses the conversation.
        """
        return await self._in_pool(lambda: self._conversation_ids(messages, tools))

    async def from_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it stands."""
        return await self._in_pool(lambda: tuple(self._tokenizer.encode(text)))

    async def from_document(self, text: str) -> tuple[int, ...]:
        """Token ids of a text with the model's leading tokens once, whether it has them or not."""
        ids, leading = await self.from_text(text), self._tokenizer.leading_ids
        return ids if ids[: len(leading)] == leading else leading + ids

    async def to_text(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return await self._in_pool(lambda: self._tokenizer.decode(ids, skip_special_tokens=False))

    def close(self) -> None:
        """Ends the threads once they have nothing left to do."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_pool(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _conversation_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[int, ...]:
        try:
            # Any exception is the template's verdict on these messages: Jinja's own errors,
            # but also a TypeError from adding a number to a string inside of it.
            values = [template_message(message) for message in messages]
            if self.tool_form is ToolForm.GENERIC:
                values, tools = plain_messages(values, tools), ()
            pieces = self._rendered_pieces(values, tools)
            return tuple(token for piece in pieces for token in self._tokenizer.encode(piece))
        except Exception as error:
            reason = str(error) or type(error).__name__
            message = f"The chat template refused the messages: {reason}"
            raise bad_request(message, param="messages") from error

    def _rendered_pieces(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[str]:
        """The rendered text, cut inside every control token that a message spells out.

        Tokenised piece by piece such a token stays ordinary text, so that nobody forges the end
        of a turn. Text without control tokens is one piece: its tokens are the canonical ones.
        """
        if self._forgeable is None:
            return [self._template.render(messages, tools)]
        mark = f"\ue000{secrets.token_hex(8)}\ue000"
        marked_messages, marked_tools = (
            [_map_strings(entry, lambda text: self._cut(text, mark)) for entry in entries]
            for entries in (messages, tools)
        )
        return self._template.render(marked_messages, marked_tools).split(mark)

    def _cut(self, text: str, mark: str) -> str:
        assert self._forgeable is not None
        pieces, start = [], 0
        # Behind the first character, and from there on: control tokens may overlap.
        while match := self._forgeable.search(text, start):
            cut = match.start() + 1
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        return mark.join(pieces)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_map_strings(entry, change) for entry in value]
    return value
