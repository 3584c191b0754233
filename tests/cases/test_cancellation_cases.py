"""Areas 6 and 7: clients that leave, overload and health. The names are ids of docs/cases.md."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_client import CHAT, AppClient
from byte_server import ByteServer, byte_server
from events import error_of
from fake_engine import FakeEngine, eventually, fake_state
from live_server import live_server

from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings
from relaykv.server.state import ServerState

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count to a million"}],
    "max_tokens": 400,
    "ignore_eos": True,
}


@pytest.fixture
def server() -> Iterator[ByteServer]:
    """With room for two requests, and steps slow enough to leave between them."""
    with byte_server(max_num_requests=2, max_num_batched_tokens=32) as running:
        launch = running.core.runner.launch

        def slowly(batch: Any) -> Any:
            time.sleep(0.02)
            return launch(batch)

        running.core.runner.launch = slowly  # type: ignore[method-assign]
        yield running
        running.assert_idle()


def is_idle(server: ByteServer) -> bool:
    stats = server.core.stats()
    return stats.num_running + stats.num_waiting + stats.num_used_blocks == 0


async def leave(url: str, body: dict[str, Any], after_s: float) -> None:
    """Sends a request and closes its connection."""
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(after_s),
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", url + CHAT, json=body) as response,
        ):
            await response.aread()
            raise AssertionError("there was nothing to leave")


async def leave_once_running(server: ByteServer, url: str, body: dict[str, Any]) -> None:
    """Sends a request and closes its connection as soon as the engine works on it."""
    leaving = asyncio.create_task(leave(url, body, 60.0))
    assert await eventually(lambda: server.core.stats().num_running == 1)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving


async def leave_stream(url: str, body: dict[str, Any]) -> None:
    """Closes the connection of a stream behind its first event."""
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", url + CHAT, json={**body, "stream": True}) as response,
    ):
        async for _ in response.aiter_raw():
            break


def test_cx_01_leaving_a_plain_request_ends_its_work(server: ByteServer) -> None:
    async def run(url: str) -> None:
        await leave_once_running(server, url, LONG)
        assert await eventually(lambda: is_idle(server), 1.0)

    with live_server(server.state) as url:
        asyncio.run(run(url))
    assert server.core.stats().num_aborts == 1


@pytest.mark.parametrize("fields", [{}, {"stop": ["x" * 300]}, {"n": 2}], ids=str)
def test_cx_02_leaving_streams_gives_every_block_back(
    server: ByteServer, fields: dict[str, Any]
) -> None:
    async def run(url: str) -> None:
        for _ in range(15):
            await leave_stream(url, {**LONG, **fields})
        assert await eventually(lambda: is_idle(server))

    with live_server(server.state) as url:
        asyncio.run(run(url))
    stats = server.core.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks


def test_cx_03_a_queued_request_whose_client_left_is_never_run(server: ByteServer) -> None:
    async def run(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            busy = [asyncio.create_task(leave(url, LONG, 4.0)) for _ in range(2)]
            assert await eventually(lambda: server.core.stats().num_running == 2)
            live = asyncio.create_task(client.post(url + CHAT, json={**LONG, "max_tokens": 3}))
            queued = [asyncio.create_task(client.post(url + CHAT, json=LONG)) for _ in range(9)]
            assert await eventually(lambda: server.core.stats().num_waiting == 10)
            for task in queued:
                task.cancel()
            assert await eventually(lambda: server.core.stats().num_waiting == 1, 1.0)
            await asyncio.gather(*busy)
            answer = await live
            assert answer.json()["usage"]["completion_tokens"] == 3

    with live_server(server.state) as url:
        asyncio.run(run(url))


@pytest.mark.parametrize("stream", [False, True])
def test_cx_04_leaving_in_prefill_ends_it_between_two_chunks(
    server: ByteServer, stream: bool
) -> None:
    prompt = {"messages": [{"role": "user", "content": f"{stream} " + "abcdefgh" * 50}]}
    body = {**prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    async def run(url: str) -> None:
        # It takes more than ten steps of 20 ms each.
        await leave_once_running(server, url, {**body, "stream": stream})
        assert await eventually(lambda: is_idle(server), 1.0)

    with live_server(server.state) as url:
        asyncio.run(run(url))
        assert server.core.stats().num_aborts == 1
        again = [server.client.chat(**body).json() for _ in range(2)]
    with byte_server() as fresh:
        cold = fresh.client.chat(**body).json()
    assert [answer["choices"] for answer in again] == [cold["choices"]] * 2


def test_op_01_a_dead_engine_is_told_to_everyone_at_once() -> None:
    with byte_server() as server:

        def die(batch: Any) -> Any:
            raise SystemExit(f"the device is gone with {batch}")

        server.core.runner.launch = die  # type: ignore[method-assign]
        assert error_of(server.client.chat(), 503)["code"] == "engine_dead"  # it was waiting
        for path in ("/health", "/ready", "/v1/models"):
            assert error_of(server.client.get(path), 503)["code"] == "engine_dead"
        assert error_of(server.client.chat(), 503)["code"] == "engine_dead"


def test_op_02_a_server_is_alive_before_it_is_ready(engine: FakeEngine) -> None:
    state = ServerState(ServerSettings())
    client = AppClient(create_app(state))
    assert client.get("/health").status_code == 200
    for response in (client.get("/ready"), client.chat()):
        assert error_of(response, 503)["code"] == "model_loading"
        assert 0 < float(response.headers["retry-after"]) <= 60
    loaded = fake_state(engine)
    state.attach(loaded.backend())
    assert client.get("/ready").status_code == 200
    assert client.chat().status_code == 200
    state.close()
