"""Function tools and output formats of /v1/responses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from app_client import AppClient
from fake_engine import FakeEngine
from test_responses import USER, answer_of, events_of, last_prompt, respond, without_ids

from relaykv.engine.request import FinishReason

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _long_context(engine: FakeEngine) -> None:
    engine.model = dataclasses.replace(engine.model, max_model_len=4000)


def without_calls_ids(value: Any) -> Any:
    if isinstance(value, dict):
        entries = without_ids(value).items()
        return {key: without_calls_ids(entry) for key, entry in entries if key != "call_id"}
    return [without_calls_ids(entry) for entry in value] if isinstance(value, list) else value


def test_a_call_is_an_output_item(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces = (CALL[:20], CALL[20:])
    answer = answer_of(client, tools=[TOOL])
    (item,) = answer["output"]
    assert item["type"] == "function_call"
    assert item["id"].startswith("fc_")
    assert item["call_id"].startswith("call_")
    assert item["name"] == "weather"
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    assert answer["status"] == item["status"] == "completed"
    assert answer["tools"] == [TOOL]
    assert answer["tool_choice"] == "auto"


@pytest.mark.parametrize("text", [CALL, "Let me see. " + CALL, CALL + "\n" + CALL], ids=repr)
@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}], ids=str)
def test_a_streamed_call_equals_the_plain_one(
    client: AppClient, engine: FakeEngine, text: str, fields: dict[str, Any]
) -> None:
    engine.script.pieces = tuple(text[start : start + 7] for start in range(0, len(text), 7))
    plain = answer_of(client, tools=[TOOL], **fields)
    events = events_of(respond(client, tools=[TOOL], stream=True, **fields))
    streamed = events[-1]["response"]
    for response in (plain, streamed):
        for item in response["output"]:
            for part in item.get("content", ()):
                del part["logprobs"]  # those of a call's tokens belong to no text
    assert without_calls_ids(streamed) == without_calls_ids(plain)
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    for event in done:
        deltas = [
            e["delta"]
            for e in events
            if e["type"] == "response.function_call_arguments.delta"
            and e["item_id"] == event["item_id"]
        ]
        assert "".join(deltas) == event["arguments"]
        assert event["name"] == "weather"
    assert len(done) == text.count("<tool_call>")
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in streamed["output"]]
    assert [e["output_index"] for e in done] == list(range(len(added) - len(done), len(added)))


def test_calls_and_their_results_are_accepted_back(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces = ("I look. ", CALL)
    first = answer_of(client, tools=[TOOL])
    call_id = first["output"][1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    answer_of(client, tools=[TOOL], input=[USER, *first["output"], result])
    by_output = last_prompt(engine)
    answer_of(client, tools=[TOOL], input=[result], previous_response_id=first["id"])
    assert last_prompt(engine) == by_output
    assert "sunny" in by_output


def test_a_call_cut_by_length_is_no_call(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces, engine.script.finish = (CALL[:40],), FinishReason.LENGTH
    for response in (
        answer_of(client, tools=[TOOL], tool_choice="required"),
        events_of(respond(client, tools=[TOOL], tool_choice="required", stream=True))[-1][
            "response"
        ],
    ):
        assert response["status"] == "incomplete"
        assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_a_forced_call_is_decoded_under_a_grammar(
    client: AppClient, engine: FakeEngine, choice: Any
) -> None:
    engine.script.pieces = (CALL,)
    answer = answer_of(client, tools=[TOOL], tool_choice=choice)
    assert answer["tool_choice"] == choice
    assert engine.script.started[0].sampling.grammar is not None


def test_a_schema_reaches_the_engine(client: AppClient, engine: FakeEngine) -> None:
    text_format = {"type": "json_schema", "name": "s", "schema": TOOL["parameters"], "strict": True}
    answer = answer_of(client, text={"format": text_format})
    assert answer["text"]["format"] == text_format
    assert engine.script.started[0].sampling.grammar is not None
    assert answer_of(client, text={"format": {"type": "json_object"}})["status"] == "completed"
    assert engine.script.started[1].sampling.grammar is not None


BAD: list[tuple[str, dict[str, Any]]] = [
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s", "schema": 5}}}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": {"type": "string"}}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": "not a name"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD, ids=str)
def test_a_bad_tool_or_format_is_named_as_it_stands_here(
    client: AppClient, engine: FakeEngine, param: str, fields: dict[str, Any]
) -> None:
    response = respond(client, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert "response_format" not in error["message"]
    assert ".function" not in error["message"]
    assert engine.script.started == []
