"""Area 12: what frameworks for agents do. The names of the tests are ids of docs/cases.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from app_client import AppClient
from byte_server import ByteServer, byte_server
from events import error_of, read_stream
from fake_engine import FakeEngine, fake_state
from live_server import live_server

STOP = "\nObservation:"
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@pytest.fixture
def server() -> Iterator[ByteServer]:
    with byte_server(num_blocks=400, max_model_len=2000) as running:
        yield running
        running.assert_idle()


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
def test_cl_01_an_answer_ends_before_an_observation(
    server: ByteServer, tools: dict[str, Any]
) -> None:
    kept = "Thought: look\nAction: search\nAction Input: {}"
    server.run_script(f"{kept}{STOP} invented")
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "What?"}], "stop": [STOP]}
    session = {"relay_session": "react"}
    answer = server.client.chat(**prompt, **tools, **session, max_tokens=200).json()
    assert answer["choices"][0]["message"]["content"] == kept
    assert answer["choices"][0]["finish_reason"] == "stop"
    stream = read_stream(server.client.chat(**prompt, **tools, max_tokens=200, stream=True))
    assert stream.texts == {0: kept}
    # What the client never saw does not stand in the recording either.
    (recording,) = server.core.recordings._recordings.values()
    text = server.engine.tokenizer.decode(recording.token_ids)
    assert "invented" not in text
    assert "Observation: " not in text


def test_cl_03_everything_we_answer_is_accepted_back_with_its_nulls(engine: FakeEngine) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with live_server(fake_state(engine)) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        for _ in range(5):
            answer = api.chat.completions.create(model="tiny", messages=messages)
            message = answer.choices[0].message.model_dump()
            nulls = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None}
            odd: dict[str, Any] = {"annotations": [], "reasoning_content": None, "parsed": None}
            clean: Any = {"role": "assistant", "content": message["content"]}
            dumped: Any = {**message, **nulls, **odd}
            api.chat.completions.create(model="tiny", messages=[*messages, dumped])
            api.chat.completions.create(model="tiny", messages=[*messages, clean])
            with_nulls, without = engine.script.started[-2:]
            assert with_nulls.prompt_token_ids == without.prompt_token_ids
            messages += [message, {"role": "user", "content": "on"}]
        api.close()


def test_cl_03_a_loop_of_tool_calls_is_accepted_back(server: ByteServer) -> None:
    call = json.dumps({"name": "search", "arguments": {"q": 'a "b" 猫'}}, ensure_ascii=False)
    server.run_script(f"<tool_call>\n{call}\n</tool_call>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "find"}]
    for _ in range(3):
        response = server.client.chat(messages=messages, tools=[TOOL], max_tokens=200)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        (made,) = message["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"q": 'a "b" 猫'}
        messages += [message, {"role": "tool", "tool_call_id": made["id"], "content": "none"}]


@pytest.mark.parametrize("session", [5, 1.5, True, [], ["a"], {}])
def test_cl_05_a_session_that_is_no_text_is_refused_by_name(
    client: AppClient, session: Any
) -> None:
    assert error_of(client.chat(relay_session=session), 400)["param"] == "relay_session"


def test_cl_05_a_session_changes_no_exact_answer(server: ByteServer) -> None:
    body = {"messages": [{"role": "user", "content": "the same"}], "seed": 3, "max_tokens": 20}
    plain = server.client.chat(**body).json()["choices"]
    exact = {"relay_session": "s", "relay": {"policy": "full"}}
    for _ in range(2):
        assert server.client.chat(**body, **exact).json()["choices"] == plain
    # Without a session its options mean nothing.
    ignored = server.client.chat(**body, relay={"policy": "shift", "explain": True}).json()
    assert ignored["choices"] == plain
    assert "relay" not in ignored
