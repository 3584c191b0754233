"""The `openai` package against a real server on the loopback interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine, Script, fake_state
from live_server import live_server
from openai.types.chat import ChatCompletionChunk

from relaykv.engine.request import FinishReason

USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(fake_state(engine)) as url,
        openai.OpenAI(base_url=f"{url}/s/crew/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


@pytest.fixture(autouse=True)
def _fresh_script(engine: FakeEngine) -> Iterator[None]:
    yield
    engine.script = Script()
    engine.alive = True


def stream(api: openai.OpenAI, **fields: Any) -> Iterator[ChatCompletionChunk]:
    chunks: Any = api.chat.completions.create(model="tiny", messages=USER, stream=True, **fields)
    return iter(chunks)


def test_a_plain_answer_is_parsed(api: openai.OpenAI, engine: FakeEngine) -> None:
    answer = api.chat.completions.create(model="tiny", messages=USER, max_tokens=9)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert answer.model_extra is not None
    assert answer.model_extra["relay"]["session"] == "crew"
    assert engine.script.started[0].relay.session == "crew"


def test_a_session_of_extra_body_wins_over_the_url(api: openai.OpenAI, engine: FakeEngine) -> None:
    api.chat.completions.create(
        model="tiny", messages=USER, extra_body={"relay_session": "own", "relay": {"store": False}}
    )
    assert engine.script.started[0].relay.session == "own"
    assert engine.script.started[0].relay.store is False


def test_a_stream_arrives_piece_by_piece(api: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(pieces=("a", "b", "c", "d"), delay_s=0.1)
    start, arrivals, text = time.monotonic(), [], ""
    for chunk in stream(api):
        if content := chunk.choices[0].delta.content:
            arrivals.append(time.monotonic() - start)
            text += content
    assert text == "abcd"
    assert arrivals[0] < 0.25
    assert arrivals[-1] - arrivals[0] > 0.2


def test_the_usage_chunk_comes_only_when_asked(api: openai.OpenAI) -> None:
    assert all(chunk.choices for chunk in stream(api))
    *chunks, last = stream(api, stream_options={"include_usage": True})
    assert all(chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 11


def test_errors_become_the_right_exceptions(api: openai.OpenAI, engine: FakeEngine) -> None:
    create: Any = api.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="nope", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=USER, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        create(model="tiny", messages=[{"role": "user", "content": "x" * 500}], stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="out of scope"):
        api.embeddings.create(model="tiny", input="x")
    engine.script = Script(finish=FinishReason.ERROR, error="no luck")
    with pytest.raises(openai.InternalServerError, match="no luck"):
        create(model="tiny", messages=USER)
    engine.alive = False
    with pytest.raises(openai.InternalServerError) as dead:
        create(model="tiny", messages=USER)
    assert dead.value.status_code == 503


def test_an_error_in_a_stream_is_raised(api: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(raises=RuntimeError("x"))
    texts: list[str | None] = []
    with pytest.raises(openai.APIError, match="The server had an error"):
        texts.extend(chunk.choices[0].delta.content for chunk in stream(api))
    assert texts == ["", "Hel", "lo", " world"]


def test_models_are_listed_and_found(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["org/tiny", "tiny"]
    assert api.models.retrieve("org/tiny").id == "org/tiny"


def test_the_stream_helper_accumulates_an_answer(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(model="tiny", messages=USER) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].message.role == "assistant"


def test_leaving_a_stream_aborts_it(api: openai.OpenAI, engine: FakeEngine) -> None:
    script = engine.script = Script(pieces=("x",) * 200, delay_s=0.02)
    chunks: Any = api.chat.completions.create(model="tiny", messages=USER, stream=True)
    for _ in range(5):
        next(chunks)
    chunks.close()
    deadline = time.monotonic() + 3
    while not script.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(script.aborted) == 1
