"""Keeps the responses of each API key for a while, so that later ones may build on them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relaykv.server.protocol import ChatMessage
from relaykv.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer and the conversation that it ends."""

    response_id: str
    body: str  # the JSON text the client got
    messages: tuple[ChatMessage, ...]  # without instructions, which are not passed on
    items: Mapping[str, Mapping[str, Any]]  # the answer's output items by id

    @property
    def num_bytes(self) -> int:
        """What it may take, parts that it shares with earlier responses included."""
        texts = (message.model_dump_json() for message in self.messages)
        return len(self.body.encode()) * 2 + sum(len(text.encode()) for text in texts)


@dataclass(slots=True)
class _Shelf:
    """The responses of one API key, oldest first; filled and emptied by the store alone."""

    entries: OrderedDict[str, tuple[StoredResponse, int, float]] = field(
        default_factory=OrderedDict
    )  # with bytes and the time after which it is gone
    num_bytes: int = 0

    def remove(self, response_id: str) -> bool:
        entry = self.entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry[1]
        return True


class ResponseStore:
    """Bounded in number, bytes and age; the key that holds the most gives up its oldest first.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keeps a response, unless it alone is over the bound."""
        num_bytes = response.num_bytes
        if num_bytes > self._settings.max_stored_response_bytes:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        expiry = self._clock() + self._settings.response_ttl_s
        shelf.entries[response.response_id] = (response, num_bytes, expiry)
        shelf.num_bytes += num_bytes
        self._expire()
        while self._is_over():
            fullest = max(self._shelves.values(), key=lambda shelf: shelf.num_bytes)
            fullest.remove(next(iter(fullest.entries)))
        self._drop_empty()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, when this key has it and it is not too old."""
        self._expire()
        self._drop_empty()
        shelf = self._shelves.get(tenant)
        entry = shelf.entries.get(response_id) if shelf is not None else None
        return entry[0] if entry is not None else None

    def find_item(self, tenant: str, item_id: str) -> Mapping[str, Any] | None:
        """An output item of one of the key's responses."""
        self._expire()
        shelf = self._shelves.get(tenant)
        for response, _, _ in reversed(shelf.entries.values() if shelf is not None else ()):
            if item_id in response.items:
                return response.items[item_id]
        return None

    def delete(self, tenant: str, response_id: str) -> bool:
        """False when the key has no such response."""
        if self.get(tenant, response_id) is None:
            return False
        removed = self._shelves[tenant].remove(response_id)
        self._drop_empty()
        return removed

    def _is_over(self) -> bool:
        num_entries = sum(len(shelf.entries) for shelf in self._shelves.values())
        num_bytes = sum(shelf.num_bytes for shelf in self._shelves.values())
        return (
            num_entries > self._settings.max_stored_responses
            or num_bytes > self._settings.max_stored_response_bytes
        )

    def _expire(self) -> None:
        now = self._clock()
        for shelf in self._shelves.values():
            while shelf.entries:
                response_id, (_, _, expiry) = next(iter(shelf.entries.items()))
                if expiry > now:
                    break
                shelf.remove(response_id)

    def _drop_empty(self) -> None:
        self._shelves = {tenant: shelf for tenant, shelf in self._shelves.items() if shelf.entries}
