"""Area 3: streams. The names of the tests are ids of docs/cases.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from app_client import AppClient
from byte_server import ByteServer, byte_server
from events import read_stream
from fake_engine import FakeEngine, Script, fake_state
from live_server import live_server

from relaykv.engine.request import FinishReason
from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings

USER = {"role": "user", "content": "Copy this line"}


@pytest.fixture(scope="module")
def server() -> Iterator[ByteServer]:
    with byte_server() as running:
        yield running
        running.assert_idle()


@pytest.fixture
def scripted() -> Iterator[ByteServer]:
    with byte_server() as running:
        yield running
        running.assert_idle()


def test_st_01_the_usage_has_a_chunk_of_its_own_before_done(server: ByteServer) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    plain = server.client.chat(**body).json()["usage"]
    stream = read_stream(
        server.client.chat(**body, stream=True, stream_options={"include_usage": True})
    )
    assert stream.is_done
    *earlier, last = stream.chunks
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == plain[key]
    assert all(chunk["usage"] is None for chunk in earlier)
    assert earlier[-1]["choices"][0]["finish_reason"] == "length"


def test_st_02_no_chunk_without_choices_comes_unasked(client: AppClient) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        stream = read_stream(client.chat(stream=True, stream_options=options))
        assert all(chunk["choices"] and "usage" not in chunk for chunk in stream.chunks)
    # Without a stream the options mean nothing, and are ignored.
    plain = client.chat(stream=False, stream_options={"include_usage": True})
    assert plain.json()["object"] == "chat.completion"


STOPS = [
    ("red green blue white", "green blue", "red "),
    ("red green blue white", "d gr", "re"),
    ("a " * 40 + "the end of it", "a a a a a a a a a a a a a a a a a a the", "a " * 22),
    ("one 赵😸 two", "赵😸", "one "),
    ("aab aaab x", "aaab", "aab "),
    ("never here", "nowhere", "never here"),
]


@pytest.mark.parametrize(("text", "stop", "expected"), STOPS)
def test_st_04_a_stop_is_found_across_tokens_and_nothing_of_it_is_sent(
    scripted: ByteServer, text: str, stop: str, expected: str
) -> None:
    scripted.run_script(text)
    body = {"messages": [USER], "stop": [stop], "max_tokens": 200}
    plain = scripted.client.chat(**body).json()["choices"][0]
    assert plain["message"]["content"] == expected
    assert plain["finish_reason"] == "stop"
    stream = read_stream(scripted.client.chat(**body, stream=True))
    assert stream.texts == {0: expected}
    assert stream.reasons == {0: ["stop"]}


def test_st_07_no_character_is_split_over_chunks(scripted: ByteServer) -> None:
    text = "😸👩\u200d👩\u200d👧 赵 é e\u0301"
    scripted.run_script(text)
    body = {"messages": [USER], "max_tokens": 200}
    stream = read_stream(scripted.client.chat(**body, stream=True))
    assert stream.texts == {0: text}
    assert "\ufffd" not in "".join(str(chunk) for chunk in stream.chunks)
    plain = scripted.client.chat(**body).json()
    assert plain["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"stop": ["q"]}, {"max_tokens": 1}],
    ids=str,
)
def test_st_09_every_choice_has_one_role_and_one_end(
    server: ByteServer, fields: dict[str, Any]
) -> None:
    body = {"messages": [USER], "max_tokens": 12, "seed": 5, **fields}
    stream = read_stream(server.client.chat(**body, stream=True))
    assert stream.is_done
    for key in ("id", "created", "model", "object"):
        assert len({chunk[key] for chunk in stream.chunks}) == 1
    plain = server.client.chat(**body).json()
    for index in range(body.get("n", 1)):
        choices = [c["choices"][0] for c in stream.chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == plain["choices"][index]["finish_reason"]
        assert stream.texts[index] == plain["choices"][index]["message"]["content"]


def test_st_10_every_stream_ends_with_done(server: ByteServer) -> None:
    for number in range(100):
        content = "word " * (number % 40)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1 + number % 7}
        stream = read_stream(server.client.chat(**body, stream=True))
        assert stream.is_done
        assert sum(map(len, stream.reasons.values())) == 1


def test_st_11_a_fault_in_mid_stream_is_an_error_event_and_frees_everything(
    server: ByteServer,
) -> None:
    runner, num_steps = server.core.runner, 0
    launch = runner.launch

    def fail_at_the_fourth(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise RuntimeError("secret of the kernel")
        return launch(batch)

    runner.launch = fail_at_the_fourth  # type: ignore[method-assign]
    try:
        response = server.client.chat(stream=True, max_tokens=50, ignore_eos=True)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    stream = read_stream(response)
    assert stream.error is not None
    assert set(stream.error) == {"message", "type", "param", "code"}
    assert stream.error["type"] == "server_error"
    assert not stream.is_done
    assert "secret" not in response.text
    server.assert_idle()
    assert server.client.chat(max_tokens=2).status_code == 200


def test_st_11_clients_raise_the_error_of_a_stream() -> None:
    script = Script(finish=FinishReason.ERROR, error="out of blocks")
    with live_server(fake_state(FakeEngine(script))) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        stream = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="out of blocks"):
            list(stream)
        api.close()


def test_st_13_silence_in_queue_and_prefill_is_filled_with_comments() -> None:
    script = Script(delay_s=0.2)
    with live_server(fake_state(FakeEngine(script), ServerSettings(keepalive_s=0.05))) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        chunks = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "Hello world"  # the client sees no comment
        api.close()
    state = fake_state(FakeEngine(script), ServerSettings(keepalive_s=0.05))
    stream = read_stream(AppClient(create_app(state)).chat(stream=True))
    assert stream.num_comments >= 6
    assert stream.texts == {0: "Hello world"}
    state.close()
