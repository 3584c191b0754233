"""Kept responses: bounded in number, bytes and age, and apart by API key."""

from __future__ import annotations

from relaykv.server.protocol import ChatMessage
from relaykv.server.response_store import ResponseStore, StoredResponse
from relaykv.server.settings import ServerSettings


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def response(name: str, text: str = "x") -> StoredResponse:
    message = ChatMessage(role="user", content=text)
    return StoredResponse(name, "{}", (message,), {f"msg_{name}": {"id": f"msg_{name}"}})


def test_a_response_is_found_by_its_key_only() -> None:
    store = ResponseStore(ServerSettings())
    store.put("a", response("1"))
    assert store.get("a", "1") is not None
    assert store.get("b", "1") is None
    assert store.find_item("a", "msg_1") == {"id": "msg_1"}
    assert store.find_item("b", "msg_1") is None
    assert not store.delete("b", "1")
    assert store.delete("a", "1")
    assert store.get("a", "1") is None


def test_a_response_is_gone_after_its_time() -> None:
    clock = Clock()
    store = ResponseStore(ServerSettings(response_ttl_s=10), clock)
    store.put("a", response("1"))
    clock.now = 9.0
    store.put("a", response("2"))
    assert store.get("a", "1") is not None
    clock.now = 10.0
    assert store.get("a", "1") is None
    assert store.find_item("a", "msg_1") is None
    assert store.get("a", "2") is not None


def test_the_key_that_holds_the_most_gives_up_its_oldest() -> None:
    store = ResponseStore(ServerSettings(max_stored_responses=3))
    store.put("a", response("small"))
    for name in "123":
        store.put("b", response(name, "large" * 10))
    assert store.get("a", "small") is not None
    assert [store.get("b", name) is not None for name in "123"] == [False, True, True]


def test_bytes_are_bounded_and_too_large_a_response_is_not_kept() -> None:
    size = response("1", "x" * 1000).num_bytes
    store = ResponseStore(ServerSettings(max_stored_response_bytes=2 * size))
    for name in "123":
        store.put("a", response(name, "x" * 1000))
    assert [store.get("a", name) is not None for name in "123"] == [False, True, True]
    store.put("a", response("huge", "x" * 5000))
    assert store.get("a", "huge") is None
    assert store.get("a", "3") is not None
