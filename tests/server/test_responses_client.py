"""/v1/responses as the `openai` package uses it, against a real server on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from fake_engine import FakeEngine, Script, fake_state
from live_server import live_server

from relaykv.engine.request import FinishReason


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(fake_state(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as api,
    ):
        yield api


@pytest.fixture(autouse=True)
def _fresh_script(engine: FakeEngine) -> Iterator[None]:
    yield
    engine.script = Script()


def test_a_plain_answer_is_parsed(api: openai.OpenAI) -> None:
    answer = api.responses.create(
        model="tiny", input="hi", instructions="be", extra_body={"relay_session": "s"}
    )
    assert answer.output_text == "Hello world"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + 11
    assert answer.model_extra is not None
    assert answer.model_extra["relay"]["session"] == "s"


def test_the_stream_helper_gathers_the_answer(api: openai.OpenAI) -> None:
    with api.responses.stream(model="tiny", input="hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Hello world"
    assert final.status == "completed"


def test_raw_events_are_typed(api: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script.finish = FinishReason.LENGTH
    events = list(api.responses.create(model="tiny", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_on_by_id_and_by_output(api: openai.OpenAI, engine: FakeEngine) -> None:
    first = api.responses.create(model="tiny", input="hi")
    api.responses.create(model="tiny", input="more", previous_response_id=first.id)
    echoed = [item.model_dump(exclude_unset=True) for item in first.output]
    user = {"role": "user", "content": "hi"}
    more = {"role": "user", "content": "more"}
    api.responses.create(model="tiny", input=[user, *echoed, more])  # type: ignore[list-item]
    by_id, by_output = engine.script.started[-2:]
    assert by_id.prompt_token_ids == by_output.prompt_token_ids


def test_a_kept_answer_is_retrieved_and_deleted(api: openai.OpenAI) -> None:
    answer = api.responses.create(model="tiny", input="hi")
    assert api.responses.retrieve(answer.id).output_text == "Hello world"
    api.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(answer.id)


def test_errors_become_the_right_exceptions(api: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as unknown:
        api.responses.create(model="tiny", input="hi", previous_response_id="resp_x")
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        api.responses.create(model="tiny", input="x" * 500, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        api.responses.create(model="tiny", input="hi", tools=[{"type": "web_search"}])
    engine.script = Script(raises=RuntimeError("x"))
    events = list(api.responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None


def test_leaving_a_stream_aborts_it(api: openai.OpenAI, engine: FakeEngine) -> None:
    script = engine.script = Script(pieces=("x",) * 200, delay_s=0.02)
    stream = api.responses.create(model="tiny", input="hi", stream=True)
    for _ in range(8):
        next(stream)
    stream.close()
    deadline = time.monotonic() + 3
    while not script.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(script.aborted) == 1
