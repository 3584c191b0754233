"""Garbage to every route: each answer has OpenAI's shape, and the engine does not notice.

Bodies go through the whole application in this process. With the real engine behind it a value
that passes validation would hit real tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from app_client import AppClient
from byte_server import byte_server
from fake_engine import fake_state
from fastapi import FastAPI
from garbage import HEADERS, ROUTES, bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaykv.server.app import create_app

_REQUESTS = st.sampled_from(sorted(ROUTES)).flatmap(
    lambda path: st.tuples(st.just(path), bodies(path), HEADERS)
)


def check_answer(response: httpx.Response) -> None:
    """JSON in OpenAI's error shape, a valid answer, or a stream of valid events."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        check_error(response.json())
    elif response.headers["content-type"].startswith("text/event-stream"):
        for line in response.text.splitlines():
            assert not line or line.startswith((": ", "data: ", "event: ")), line
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:], parse_constant=_no_constant), line
    else:
        body = json.loads(response.text, parse_constant=_no_constant)
        assert isinstance(body, dict)
        assert "error" not in body or body["error"] is None


def check_error(body: Any) -> None:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert "Traceback" not in error["message"]
    assert "pydantic" not in error["message"]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def fuzz(app: FastAPI, num_examples: int) -> None:
    client = AppClient(app)

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(_REQUESTS)
    def send(request: tuple[str, bytes, dict[str, str]]) -> None:
        path, body, headers = request
        sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        check_answer(client.post(path, content=body, headers=sent))

    send()


def run_on_fake_engine(num_examples: int) -> None:
    state = fake_state()
    fuzz(create_app(state), num_examples)
    assert AppClient(create_app(state)).chat().status_code == 200
    state.close()


def run_on_real_engine(num_examples: int) -> None:
    with byte_server(max_model_len=128) as server:
        fuzz(server.app, num_examples)
        answer = server.client.chat(max_tokens=3, temperature=0)
        assert answer.status_code == 200, answer.text
        server.assert_idle()


ENGINES = pytest.mark.parametrize("run", [run_on_fake_engine, run_on_real_engine])


@ENGINES
def test_garbage_is_answered_and_harms_nobody(run: Callable[[int], None]) -> None:
    run(300)


@pytest.mark.slow
@ENGINES
def test_much_garbage_is_answered_and_harms_nobody(run: Callable[[int], None]) -> None:
    run(2000)
