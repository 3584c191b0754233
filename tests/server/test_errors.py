"""Every way to fail has OpenAI's error shape and names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_client import CHAT, AppClient
from fake_engine import FakeEngine, fake_state

from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings

USER = {"role": "user", "content": "hi"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "pydantic" not in error["message"]
    return dict(error)


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": {}}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"role": "banana", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[1].content", {"messages": [USER, {"role": "user", "content": 3}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [3]}]}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "0.5"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 2}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -9}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("n", {"n": 10000}),
    ("n", {"n": 1.0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "16"}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("seed", {"seed": 2**63}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": list("abcde")}),
    ("stop", {"stop": 1}),
    ("stop_token_ids", {"stop_token_ids": [300]}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("logit_bias", {"logit_bias": {"99999999": 5}}),
    ("logit_bias", {"logit_bias": {"300": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 5}}),
    ("logit_bias", {"logit_bias": {"five": 5}}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"5": "1"}}),
    ("logit_bias", {"logit_bias": [5]}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream": True, "stream_options": 1}),
    ("relay", {"relay": "full"}),
    ("relay.store", {"relay": {"store": 1}}),
    ("relay_session", {"relay_session": 5}),
    ("relay_session", {"relay_session": ["a"]}),
    ("relay_session", {"relay_session": {}}),
    ("relay_session", {"relay_session": "a\nb"}),
    ("relay_session", {"relay_session": "x" * 257}),
    ("metadata.relay_session", {"metadata": {"relay_session": 3}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("audio", {"audio": {"voice": "x"}}),
    ("web_search_options", {"web_search_options": {}}),
    ("continue_final_message", {"continue_final_message": True}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_field_is_a_400_that_names_it(
    client: AppClient, engine: FakeEngine, param: str, fields: dict[str, Any]
) -> None:
    error = error_of(client.chat(**fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert engine.script.started == []


HARMLESS_FIELDS: list[dict[str, Any]] = [
    {"store": True, "metadata": {"run": "7"}, "service_tier": "auto", "user": "u", "unknown": 1},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    {"tool_choice": "none", "functions": [], "function_call": "none"},
    {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None},
    {"prediction": {"type": "content", "content": "x"}, "reasoning_effort": "low"},
    {"stream_options": {"include_usage": True}, "stream": False},
    {"stop": [], "logit_bias": {}, "top_k": -1, "metadata": "anything", "verbosity": "low"},
]


@pytest.mark.parametrize("fields", HARMLESS_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_fields_that_change_nothing_are_ignored(client: AppClient, fields: dict[str, Any]) -> None:
    assert client.chat(**fields).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_by_name(client: AppClient, number: str) -> None:
    body = '{"messages":[{"role":"user","content":"hi"}],"temperature":' + number + "}"
    assert error_of(client.post(CHAT, content=body), 400)["param"] == "temperature"


def test_nan_in_an_ignored_field_is_still_no_json(client: AppClient) -> None:
    body = '{"messages":[{"role":"user","content":"hi"}],"unknown":NaN}'
    assert "NaN" in error_of(client.post(CHAT, content=body), 400)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"messages": [',
        b"[]",
        b"null",
        b'"hi"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_json_object_is_a_400(client: AppClient, body: bytes) -> None:
    error_of(client.post(CHAT, content=body), 400)


def test_half_a_surrogate_pair_is_a_400(client: AppClient) -> None:
    body = rb'{"messages":[{"role":"user","content":"\ud83d"}]}'
    assert error_of(client.post(CHAT, content=body), 400)["param"] == "messages[0].content"


def test_a_part_that_is_no_text_is_named(client: AppClient) -> None:
    part = {"type": "input_audio", "input_audio": {}}
    response = client.chat(messages=[{"role": "user", "content": [part]}])
    assert "input_audio" in error_of(response, 400)["message"]


def test_a_body_over_the_limit_is_a_413() -> None:
    state = fake_state(settings=ServerSettings(max_body_bytes=100))
    client = AppClient(create_app(state))
    error_of(client.chat(messages=[{"role": "user", "content": "x" * 100}]), 413)

    async def chunks() -> Any:
        yield b" " * 60
        yield b" " * 60

    error_of(client.post(CHAT, content=chunks()), 413)
    state.close()


def test_a_compressed_body_is_a_415(client: AppClient) -> None:
    headers = {"Content-Encoding": "gzip"}
    error_of(client.post(CHAT, content=b"x", headers=headers), 415)


def test_unknown_routes_and_methods_have_the_error_shape(client: AppClient) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    error = error_of(client.get(CHAT), 405)
    assert "GET" in error["message"]
    assert client.get(CHAT).headers["allow"] == "POST"


def test_embeddings_are_out_of_scope(client: AppClient) -> None:
    assert "out of scope" in error_of(client.post("/v1/embeddings", json={}), 404)["message"]


def test_a_dead_engine_is_a_503(client: AppClient, engine: FakeEngine) -> None:
    engine.alive = False
    response = client.chat()
    assert error_of(response, 503)["code"] == "engine_dead"
    # The openai packages retry every 503 but where they are told that it is no use.
    assert response.headers["x-should-retry"] == "false"


def test_an_unexpected_failure_tells_no_internals(client: AppClient, engine: FakeEngine) -> None:
    engine.script.raises = KeyError("secret")
    error = error_of(client.chat(), 500)
    assert "secret" not in error["message"]
