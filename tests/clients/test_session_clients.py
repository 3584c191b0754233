"""The helpers that bind a client to a session, and the terminal chat."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import openai
import pytest
from fake_server import FakeServer
from openai.types.chat import ChatCompletionChunk

from relaykv.clients import chat
from relaykv.clients.openai_client import num_taken_over, open_async_session, open_session
from relaykv.clients.session_url import server_url, session_url


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield fake
        fake.shutdown()


def test_a_session_of_any_characters_is_one_part_of_the_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RELAYKV_URL", raising=False)
    assert session_url("a/b c?é") == "http://127.0.0.1:8000/s/a%2Fb%20c%3F%C3%A9/v1"
    with pytest.raises(ValueError, match="name"):
        session_url("")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_address_may_come_with_or_without_v1(url: str) -> None:
    assert session_url("a", url) == "http://h:1/s/a/v1"


def test_the_environment_says_where_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYKV_URL", "http://h:2/v1")
    assert server_url() == "http://h:2"
    assert server_url("http://h:3") == "http://h:3"


def test_openai_clients_are_bound_to_the_session() -> None:
    client = open_session("lamp", "http://h:1", max_retries=0)
    assert str(client.base_url) == "http://h:1/s/lamp/v1/"
    assert client.max_retries == 0
    assert str(open_async_session("lamp", "http://h:1").base_url) == str(client.base_url)


def test_the_second_agent_is_told_what_it_took_over(server: FakeServer) -> None:
    with open_session("lamp", server.url) as client:
        text, first = _ask(client, "You write.", "Go.")
        _, second = _ask(client, "You review.", f"Review: {text} End.")
    assert num_taken_over(first) == 0
    assert num_taken_over(second) == 20


def _ask(client: openai.OpenAI, system: str, user: str) -> tuple[str, ChatCompletionChunk | None]:
    """An answer's text, and its stream's last chunk."""
    text, last = "", None
    stream = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        max_tokens=20,
        stream=True,
    )
    for last in stream:
        text += "".join(choice.delta.content or "" for choice in last.choices)
    return text, last


def test_the_chat_shows_what_every_turn_reused(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\n\n/role You review.\nReview it.\n"))
    chat.main(["--url", server.url, "--session", "lamp"])
    out = capsys.readouterr().out
    assert "fake-model, session lamp" in out
    assert out.count("[prompt ") == 2
    assert " 0 prefix, 0 relayed" in out
    assert " 0 prefix, 375 relayed, 125 repaired" in out
    roles = [message["role"] for message in server.requests[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert server.requests[1]["messages"][0]["content"] == "You review."


def test_the_chat_says_why_it_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\n"))
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(SystemExit, match="chat: Connection error"):
        chat.main(["--url", "http://127.0.0.1:9"])
