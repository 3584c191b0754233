"""The events of a streamed answer, and what happens when something breaks off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_client import CHAT, AppClient
from fake_engine import FakeEngine, Script, eventually, fake_state
from live_server import live_server

from relaykv.engine.client import EngineDeadError
from relaykv.engine.request import FinishReason
from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_has_role_text_and_end_in_order(client: AppClient) -> None:
    chunks = chunks_of(client.chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    texts = [{"content": "Hel"}, {"content": "lo"}, {"content": " world"}]
    assert deltas == [{"role": "assistant", "content": ""}, *texts, {}]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for key in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert not any("usage" in chunk or "relay" in chunk for chunk in chunks)


def test_usage_is_one_more_chunk_and_only_when_asked(client: AppClient) -> None:
    plain = client.chat().json()["usage"]
    chunks = chunks_of(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for options in ({"include_usage": False}, {}):
        chunks = chunks_of(client.chat(stream=True, stream_options=options))
        assert all(chunk["choices"] for chunk in chunks)


def test_the_relay_object_is_on_the_end_and_on_the_usage(client: AppClient) -> None:
    options = {"include_usage": True}
    chunks = chunks_of(client.chat(stream=True, relay_session="s", stream_options=options))
    with_relay = [chunk for chunk in chunks if "relay" in chunk]
    assert with_relay == chunks[-2:]
    assert with_relay[0]["choices"][0]["finish_reason"] == "stop"
    assert with_relay[0]["relay"]["tokens"]["relayed"] == 5


def test_every_choice_has_one_role_and_one_end(client: AppClient, engine: FakeEngine) -> None:
    chunks = chunks_of(client.chat(stream=True, n=3, logprobs=True))
    for index in range(3):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices].count("stop") == 1
        assert choices[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in choices) == "Hello world"
        entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"Hello world"
    assert len(engine.script.started) == 3


def test_characters_that_some_clients_take_for_line_ends_are_escaped(
    client: AppClient, engine: FakeEngine
) -> None:
    engine.script.pieces = ("a\u2028b\x85c\r\n\n", "猫")
    response = client.chat(stream=True)
    chunks = chunks_of(response)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "a\u2028b\x85c\r\n\n猫"
    assert all(line.startswith("data: ") for line in response.text.splitlines() if line)


def test_a_failure_in_the_middle_is_an_error_event_without_done(
    client: AppClient, engine: FakeEngine
) -> None:
    failures: list[tuple[Exception | None, str]] = [
        (RuntimeError("secret"), "The server had an error"),
        (EngineDeadError("gone"), "engine has stopped"),
        (None, "out of blocks"),
    ]
    for raises, words in failures:
        engine.script.raises = raises
        engine.script.finish, engine.script.error = FinishReason.ERROR, "out of blocks"
        response = client.chat(stream=True)
        last = response.text.rstrip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "[DONE]" not in response.text
        assert "secret" not in response.text


def test_validation_comes_before_the_headers_of_a_stream(client: AppClient) -> None:
    response = client.chat(stream=True, temperature=3)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_silence_is_filled_with_comments(engine: FakeEngine) -> None:
    engine.script.delay_s = 0.12
    state = fake_state(engine, ServerSettings(keepalive_s=0.03))
    response = AppClient(create_app(state)).chat(stream=True)
    state.close()
    events = response.text.split("\n\n")
    assert events[0] == ": keepalive"
    assert events.count(": keepalive") >= 6
    data = [event for event in events if event.startswith("data: {")]
    texts = [json.loads(e[6:])["choices"][0]["delta"].get("content", "") for e in data]
    assert "".join(texts) == "Hello world"


@pytest.fixture
def slow_server() -> Iterator[tuple[str, Script]]:
    script = Script(pieces=("x",) * 200, delay_s=0.05)
    with live_server(fake_state(FakeEngine(script))) as url:
        yield url, script


@pytest.mark.parametrize("num_choices", [1, 3])
def test_leaving_a_stream_aborts_it(slow_server: tuple[str, Script], num_choices: int) -> None:
    url, script = slow_server

    async def leave_after_a_few_events() -> None:
        body = {**BODY, "stream": True, "n": num_choices}
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", url + CHAT, json=body) as response,
        ):
            num_events = 0
            async for line in response.aiter_lines():
                num_events += line.startswith("data: ")
                if num_events == 10:
                    break
        assert await eventually(lambda: len(script.aborted) == num_choices)

    asyncio.run(leave_after_a_few_events())
    assert script.finished == []


def test_leaving_before_the_first_event_aborts(slow_server: tuple[str, Script]) -> None:
    url, script = slow_server
    script.delay_s = 60.0

    async def leave() -> None:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", url + CHAT, json={**BODY, "stream": True}),
        ):
            assert await eventually(lambda: len(script.started) == 1)
        assert await eventually(lambda: len(script.aborted) == 1)

    asyncio.run(leave())


def test_leaving_a_plain_request_aborts_it(slow_server: tuple[str, Script]) -> None:
    url, script = slow_server

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url + CHAT, json=BODY, timeout=0.3)
        assert await eventually(lambda: len(script.aborted) == 1)

    asyncio.run(leave())
    assert script.finished == []


def test_the_server_works_on_after_many_left(slow_server: tuple[str, Script]) -> None:
    url, script = slow_server

    async def run() -> None:
        async with httpx.AsyncClient() as client:

            async def leave() -> None:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(url + CHAT, json=BODY, timeout=0.2)

            await asyncio.gather(*(leave() for _ in range(20)))
            assert await eventually(lambda: len(script.aborted) == 20)
            script.delay_s = 0.0
            response = await client.post(url + CHAT, json=BODY)
            assert response.json()["choices"][0]["message"]["content"] == "x" * 200

    asyncio.run(run())
