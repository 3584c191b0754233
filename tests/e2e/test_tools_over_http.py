"""Tool calls and structured output over HTTP: the real server and the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from relaykv.clients.server_process import running_server

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "description": "The weather of the next days",
            "parameters": PARAMETERS,
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time now"}},
]
CITIES = ("Oslo", "Łódź", "東京", "Lima", "New York")


@pytest.fixture(scope="module")
def client(default_model_dir: Path) -> Iterator[openai.OpenAI]:
    assert default_model_dir.is_dir()
    with running_server(None) as root:
        yield openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0)


def wish(number: int, temperature: float) -> dict[str, Any]:
    """A request that must call one tool."""
    city = CITIES[number % len(CITIES)]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is the weather in {city}, please?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": number,
        "max_tokens": 150,
    }


def plain_call(client: openai.OpenAI, wanted: dict[str, Any]) -> tuple[str, str]:
    (choice,) = client.chat.completions.create(**wanted).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    return call.function.name, call.function.arguments


def streamed_call(client: openai.OpenAI, wanted: dict[str, Any]) -> tuple[str, str]:
    with client.chat.completions.stream(**wanted) as stream:
        completion: Any = stream.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    return call.function.name, call.function.arguments


def assert_valid(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "get_time":
        assert value == {}
        return
    assert name == "get_forecast"
    assert value.keys() == {"city", "days"}
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 20
    assert 1 <= value["days"] <= 14


def compare(client: openai.OpenAI, count: int) -> None:
    for temperature in (0.0, 0.8):
        for number in range(count):
            wanted = wish(number, temperature)
            call = plain_call(client, wanted)
            assert_valid(*call)
            assert streamed_call(client, wanted) == call


def test_required_calls_are_valid_and_the_same_streamed_and_plain(client: openai.OpenAI) -> None:
    compare(client, 5)


@pytest.mark.slow
def test_fifty_required_calls_are_valid_and_the_same_streamed_and_plain(
    client: openai.OpenAI,
) -> None:
    compare(client, 25)  # at each of two temperatures


def test_json_answers_satisfy_their_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a trip to Oslo as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "trip", "strict": True, "schema": PARAMETERS},
        },
        n=2,
        temperature=0.8,
        seed=1,
        max_tokens=80,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert_valid("get_forecast", choice.message.content or "")


def test_a_call_that_the_limit_cuts_is_no_call(client: openai.OpenAI) -> None:
    wanted = {**wish(0, 0.0), "max_tokens": 9}
    (choice,) = client.chat.completions.create(**wanted).choices
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls


def test_an_answer_that_may_call_is_text_or_valid_calls(client: openai.OpenAI) -> None:
    wanted = {**wish(1, 0.8), "tool_choice": "auto", "max_tokens": 40}
    (choice,) = client.chat.completions.create(**wanted).choices
    assert choice.message.content or choice.message.tool_calls
    for call in choice.message.tool_calls or ():
        assert_valid(call.function.name, call.function.arguments)


def test_responses_call_tools_too(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    answer = client.responses.create(
        model=MODEL,
        input="What is the weather in Oslo?",
        tools=tools,
        tool_choice={"type": "function", "name": "get_forecast"},
        temperature=0,
        max_output_tokens=100,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert_valid(call.name, call.arguments)
