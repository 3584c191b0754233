"""Area 5: errors and limits. The names of the tests are ids of docs/cases.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_client import CHAT, AppClient
from byte_server import ByteServer, byte_server, byte_tokenizer
from events import error_of, read_stream
from fake_engine import MAX_MODEL_LEN, ChatMlTemplate, FakeEngine, Script, fake_state
from live_server import live_server

from relaykv.server.app import create_app
from relaykv.server.prompt import PromptBuilder
from relaykv.server.settings import ServerSettings
from relaykv.server.state import Backend, ServerState

OVERHEAD = 3 + len("user\n\nassistant\n")  # tokens of the template around a message


@pytest.fixture(scope="module")
def server() -> Iterator[ByteServer]:
    with byte_server() as running:
        yield running
        running.assert_idle()


def user(num_tokens: int) -> list[dict[str, str]]:
    """A conversation whose prompt has this many tokens, a byte each."""
    return [{"role": "user", "content": "x" * (num_tokens - OVERHEAD)}]


REQUESTS: list[tuple[int, str, str, dict[str, Any]]] = [
    (400, "POST", CHAT, {"json": {"messages": 5}}),
    (400, "POST", CHAT, {"content": b"not json"}),
    (400, "POST", CHAT, {"content": b"messages=hi", "headers": {"Content-Type": "text/plain"}}),
    (400, "POST", "/tokenize", {"content": b"{"}),
    (400, "POST", "/v1/completions", {"json": {}}),
    (404, "GET", "/nowhere", {}),
    (404, "POST", "/v1/embeddings", {"json": {}}),
    (404, "GET", "/v1/models/nope", {}),
    (404, "GET", "/v1/relay/sessions/nope", {}),
    (405, "GET", CHAT, {}),
    (405, "DELETE", "/tokenize", {}),
    (413, "POST", CHAT, {"content": b" " * 2000}),
    (415, "POST", CHAT, {"content": b"{}", "headers": {"Content-Encoding": "gzip"}}),
]


@pytest.mark.parametrize(("status", "method", "path", "options"), REQUESTS)
def test_er_01_every_error_has_the_same_envelope(
    status: int, method: str, path: str, options: dict[str, Any]
) -> None:
    state = fake_state(settings=ServerSettings(max_body_bytes=1000))
    error_of(AppClient(create_app(state)).request(method, path, **options), status)
    state.close()


def test_er_01_a_fault_of_the_engine_is_a_500_in_the_same_envelope(
    client: AppClient, engine: FakeEngine
) -> None:
    engine.script.raises = RuntimeError("<object at 0x7f>")
    error_of(client.chat(), 500)
    engine.script.raises = None
    assert client.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_er_02_an_overflow_says_the_real_numbers(client: AppClient, stream: bool) -> None:
    for num_tokens in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 3 * MAX_MODEL_LEN):
        error = error_of(client.chat(messages=user(num_tokens), stream=stream), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
        assert f"resulted in {num_tokens} tokens" in error["message"]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4096}, {"max_completion_tokens": 10**9}])
def test_er_03_a_limit_beyond_the_window_is_cut_to_it(
    server: ByteServer, limit: dict[str, int]
) -> None:
    window = server.engine.model.max_model_len
    for num_tokens in (100, window - 1):
        body = {"messages": user(num_tokens), "ignore_eos": True, **limit}
        answer = server.client.chat(**body).json()
        assert answer["usage"]["prompt_tokens"] == num_tokens
        assert answer["usage"]["total_tokens"] == window
        assert answer["choices"][0]["finish_reason"] == "length"
    error = error_of(server.client.chat(messages=user(window), **limit), 400)
    assert error["code"] == "context_length_exceeded"


def test_er_04_a_prompt_is_never_cut_to_fit(client: AppClient, engine: FakeEngine) -> None:
    messages = [{"role": "system", "content": "The code word is PELICAN-58"}, *user(400)]
    for session in (None, "long"):
        error = error_of(client.chat(messages=messages, relay_session=session), 400)
        assert error["code"] == "context_length_exceeded"
    assert engine.script.started == []


def test_er_06_only_listed_names_are_models(client: AppClient) -> None:
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == ["org/tiny", "tiny"]
    for name in (*listed, *(f"openai/{name}" for name in listed), None):
        assert client.chat(model=name).status_code == 200
        assert client.get(f"/v1/models/{name or listed[0]}").status_code == 200
    for name in ("nope", "", "org/", "tiny/org"):
        assert error_of(client.chat(model=name), 404)["code"] == "model_not_found"


def test_er_07_requests_that_outgrow_the_memory_together_all_finish() -> None:
    bodies = [
        {
            "messages": [{"role": "user", "content": f"number {number}"}],
            "max_tokens": 150,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(4)
    ]
    with byte_server(num_blocks=18, max_model_len=240) as small:
        solo = [small.client.chat(**body).json() for body in bodies]
        together = small.chat_all(bodies)
        assert small.core.stats().num_preemptions > 0
        small.assert_idle()
    for alone, crowded in zip(solo, together, strict=True):
        assert crowded["choices"] == alone["choices"]


HUGE_BODIES: list[tuple[str, bytes, int]] = [
    ("over the limit", b'{"messages": "' + b"x" * 9_000_000 + b'"}', 413),
    (
        "one long word",
        b'{"messages": [{"role": "user", "content": "' + b"a" * 5_000_000 + b'"}]}',
        400,
    ),
    ("deep", b"[" * 5000 + b"]" * 5000, 400),
    (
        "many messages",
        b'{"messages": [' + b'{"role":"user","content":"x"},' * 100_000 + b"{}]}",
        400,
    ),
]


@pytest.mark.parametrize(("name", "body", "status"), HUGE_BODIES, ids=lambda value: str(value)[:20])
def test_er_09_a_huge_body_stalls_nobody(name: str, body: bytes, status: int) -> None:
    script = Script(pieces=("x",) * 40, delay_s=0.05)
    prompts = PromptBuilder(ChatMlTemplate(), byte_tokenizer())
    settings = ServerSettings(max_body_bytes=8_000_000)
    state = ServerState(settings, Backend(FakeEngine(script), prompts))

    async def run(url: str) -> float:
        slowest = 0.0
        async with httpx.AsyncClient(timeout=60) as client:
            chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            stream = asyncio.create_task(client.post(url + CHAT, json=chat))
            huge = asyncio.create_task(client.post(url + CHAT, content=body))
            while not huge.done():
                start = time.monotonic()
                assert (await client.get(f"{url}/health")).status_code == 200
                slowest = max(slowest, time.monotonic() - start)
                await asyncio.sleep(0.02)
            error_of(await huge, status)
            assert read_stream(await stream).texts == {0: "x" * 40}, name
        return slowest

    with live_server(state) as url:
        assert asyncio.run(run(url)) < 1.0
