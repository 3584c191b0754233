"""Tools and structured output over HTTP, with an engine that says what the test scripts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest
from app_client import AppClient
from fake_engine import FakeEngine, Script, fake_state
from live_server import live_server
from test_chat_route import prompt_text
from test_streaming import chunks_of

from relaykv.engine.request import FinishReason, GrammarKind
from relaykv.server.chat_template import HuggingFaceTemplate

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather now", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ARGUMENTS = '{"city": "Oslo"}'
MARKUP = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def engine() -> FakeEngine:
    return roomy_engine(Script())


def roomy_engine(script: Script) -> FakeEngine:
    """With room for descriptions of tools at one token a byte."""
    engine = FakeEngine(script)
    engine.model = dataclasses.replace(engine.model, max_model_len=8000)
    return engine


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}


def pieces(text: str, size: int) -> tuple[str, ...]:
    return tuple(text[at : at + size] for at in range(0, len(text), size))


def folded(response: httpx.Response) -> dict[str, Any]:
    """A stream put together as SDKs do it; ids must be told once."""
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    for chunk in chunks_of(response):
        (choice,) = chunk["choices"]
        assert reason is None
        reason = choice["finish_reason"]
        content += choice["delta"].get("content", "")
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["id"].startswith("call_")
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return {"content": content, "calls": calls, "reason": reason}


def plain(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert (message["content"] is None) <= bool(calls)
    return {
        "content": message["content"] or "",
        "calls": [call["function"] for call in calls],
        "reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 1000])
def test_a_call_is_the_same_streamed_and_plain_whatever_the_pieces(
    client: AppClient, engine: FakeEngine, size: int
) -> None:
    second = MARKUP.replace("Oslo", 'Łódź }]\\"')
    engine.script.pieces = pieces(f"One moment.\n{MARKUP}\n{second}", size)
    answer = plain(client.chat(tools=[WEATHER]))
    assert answer == folded(client.chat(tools=[WEATHER], stream=True))
    assert answer["content"] == "One moment."
    assert answer["reason"] == "tool_calls"
    assert [json.loads(call["arguments"])["city"] for call in answer["calls"]] == [
        "Oslo",
        'Łódź }]"',
    ]


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER]}, "tool_calls"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_calls"),
    ({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, "tool_calls"),
    ({"tools": [WEATHER, CLOCK], "tool_choice": NAMED}, "tool_calls"),
    ({"tools": [WEATHER], "tool_choice": "none"}, "stop"),
    ({}, "stop"),
]


@pytest.mark.parametrize(("fields", "reason"), CHOICES, ids=str)
def test_the_finish_reason_follows_the_choice(
    client: AppClient, engine: FakeEngine, fields: dict[str, Any], reason: str
) -> None:
    engine.script.pieces = pieces(MARKUP, 5)
    answer = plain(client.chat(**fields))
    assert answer == folded(client.chat(**fields, stream=True))
    assert answer["reason"] == reason
    if reason == "stop":
        assert answer == {"content": MARKUP, "calls": [], "reason": "stop"}
    else:
        assert answer["calls"] == [{"name": "get_weather", "arguments": ARGUMENTS}]
        assert answer["content"] == ""


def test_a_call_that_the_limit_cuts_is_no_call(client: AppClient, engine: FakeEngine) -> None:
    engine.script.finish = FinishReason.LENGTH
    for stop in (3, 20, len(MARKUP) - 1):
        engine.script.pieces = pieces(MARKUP[:stop], 4)
        answer = plain(client.chat(tools=[WEATHER], tool_choice="required"))
        assert answer == {"content": "", "calls": [], "reason": "length"}
        stream = client.chat(tools=[WEATHER], tool_choice="required", stream=True)
        assert folded(stream) == answer


def test_prose_with_tools_on_offer_is_an_ordinary_answer(client: AppClient) -> None:
    response = client.chat(tools=[WEATHER], parallel_tool_calls=None)
    assert "tool_calls" not in response.json()["choices"][0]["message"]
    assert plain(response) == {"content": "Hello world", "calls": [], "reason": "stop"}


def test_log_probabilities_of_calls_arrive_in_a_stream(
    client: AppClient, engine: FakeEngine
) -> None:
    engine.script.pieces = pieces(MARKUP, 6)
    chunks = chunks_of(client.chat(tools=[WEATHER], logprobs=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == MARKUP


def test_tools_are_described_in_the_system_message(client: AppClient, engine: FakeEngine) -> None:
    client.chat(tools=[WEATHER, CLOCK])
    alone = prompt_text(engine)
    assert alone.startswith("system\n# Tools")
    assert json.dumps(WEATHER) in alone
    assert '"name": "clock", "parameters": {"type": "object", "properties": {}}' in alone
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    client.chat(tools=[WEATHER], messages=messages)
    assert prompt_text(engine).startswith("system\nBe kind.\n\n# Tools")
    client.chat(tools=[WEATHER], tool_choice="none", messages=messages)
    assert prompt_text(engine).startswith("system\nBe kind.\n")
    assert "# Tools" not in prompt_text(engine)


CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("content", ["null", "absent", '""'])
def test_calls_and_results_in_the_history_read_like_the_model_s_own(
    client: AppClient, engine: FakeEngine, content: str
) -> None:
    call = {**CALL, "function": {**CALL["function"], "arguments": '{"city":"Oslo"}'}}
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call, call], "refusal": None}
    if content != "absent":
        turn["content"] = json.loads(content)
    results = [{"role": "tool", "tool_call_id": "call_1", "content": text} for text in ("7C", "8C")]
    response = client.chat(messages=[{"role": "user", "content": "?"}, turn, *results])
    assert response.status_code == 200
    shown = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in ("7C", "8C"))
    assert prompt_text(engine) == (
        f"user\n?\nassistant\n{MARKUP}\n{MARKUP}\nuser\n{shown}assistant\n"
    )


def test_text_beside_calls_and_the_older_form_of_a_call_are_rendered(
    client: AppClient, engine: FakeEngine
) -> None:
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    turn = {"role": "assistant", "content": "Let me check.", "function_call": function}
    result = {"role": "function", "name": "get_weather", "content": "7C"}
    assert client.chat(messages=[turn, result]).status_code == 200
    assert f"assistant\nLet me check.\n{MARKUP}\nuser\n" in prompt_text(engine)


def test_a_template_with_tools_gets_them_as_they_are() -> None:
    source = (
        "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    )
    template = HuggingFaceTemplate(source)
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7C"},
    ]
    text = template.render(messages, [WEATHER])
    assert text == f"<tool_call>{json.dumps(WEATHER)}assistant:Oslo;tool:7C;"
    assert template.render(messages) == "assistant:Oslo;tool:7C;"


def test_control_tokens_in_a_tool_are_text(client: AppClient, engine: FakeEngine) -> None:
    bad = {"type": "object", "properties": {"<|im_end|>": {"description": "<|im_start|>"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    client.chat(tools=[tool])
    ids = engine.script.started[-1].prompt_token_ids
    assert sum(token > 255 for token in ids) == 5  # two messages and the start of the answer
    assert "<|im_end|>" in prompt_text(engine)


def grammar_of(engine: FakeEngine) -> Any:
    return engine.script.started[-1].sampling.grammar


def test_the_engine_gets_a_grammar_when_the_answer_has_a_form(
    client: AppClient, engine: FakeEngine
) -> None:
    client.chat(response_format={"type": "text"})
    assert grammar_of(engine) is None
    client.chat(response_format={"type": "json_object"}, n=2)
    assert grammar_of(engine).kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar_of(engine).text) == {"type": "object"}
    client.chat(response_format=json_schema(SCHEMA))
    assert json.loads(grammar_of(engine).text) == SCHEMA
    client.chat(tools=[WEATHER], tool_choice="required")
    assert grammar_of(engine).text.startswith("start: call")
    client.chat(tools=[WEATHER], tool_choice="none")
    assert grammar_of(engine) is None
    client.chat(tools=[WEATHER], response_format=json_schema(SCHEMA))
    assert grammar_of(engine).text.startswith("start: answer | call")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": NAMED, "tools": []}),
    ("tool_choice", {"tool_choice": NAMED, "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": "maybe", "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": 1, "tools": [CLOCK]}),
    ("tool_choice.function.name", {"tool_choice": {"type": "function"}, "tools": [CLOCK]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[1].function.name", {"tools": [CLOCK, CLOCK]}),
    ("tools", {"tools": [CLOCK] * 129}),
    ("messages[0].tool_calls[0].function", {"messages": [{"role": "user", "tool_calls": [{}]}]}),
    ("response_format", {"response_format": "json"}),
    ("response_format.type", {"response_format": {}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema", "schema": {}}}),
    ("response_format.json_schema.schema", {"response_format": json_schema(None)}),
    ("response_format.json_schema.schema", {"response_format": json_schema([])}),
]
BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "nonsense"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}},
     "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), BAD, ids=[str(fields)[:60] for _, fields in BAD])
def test_a_bad_field_is_refused_by_name(
    client: AppClient, engine: FakeEngine, param: str, fields: dict[str, Any]
) -> None:
    for stream in (False, True):
        response = client.chat(**fields, stream=stream)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert not engine.script.started


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
def test_a_schema_that_cannot_be_kept_is_refused_before_generation(
    client: AppClient, engine: FakeEngine, schema: dict[str, Any]
) -> None:
    response = client.chat(response_format=json_schema(schema), stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response = client.chat(tools=[CLOCK, tool], tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].function.parameters"
    assert not engine.script.started


def test_what_is_not_supported_of_a_schema_matters_only_when_it_is_promised(
    client: AppClient,
) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": unique}
    assert client.chat(tools=[{"type": "function", "function": function}]).status_code == 200
    strict = {"type": "function", "function": {**function, "strict": True}}
    refused = client.chat(tools=[strict]).json()["error"]
    assert refused["param"] == "tools[0].function.parameters"
    assert "uniqueItems" in refused["message"]


def test_a_client_s_own_grammar_options_do_not_count(client: AppClient) -> None:
    schema = {**BAD_SCHEMAS[-1], "x-guidance": {"lenient": True}}
    assert client.chat(response_format=json_schema(schema)).status_code == 400


def test_the_openai_package_reads_calls_and_sends_them_back() -> None:
    engine = roomy_engine(Script(pieces=pieces(f"Well.\n{MARKUP}", 9)))
    state = fake_state(engine)
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    tools: list[Any] = [WEATHER]
    with live_server(state) as root, openai.OpenAI(base_url=f"{root}/v1", api_key="x") as client:
        create = client.chat.completions.create
        answer = create(model="tiny", messages=messages, tools=tools).choices[0].message
        assert answer.tool_calls
        with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls
        assert final.message.tool_calls[0].function.arguments == ARGUMENTS
        assert final.message.content == answer.content == "Well."
        result: Any = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "7C"}
        dumped: Any = answer.model_dump()
        create(model="tiny", messages=[*messages, dumped, result], tools=tools)
        echo: Any = answer
        create(model="tiny", messages=[*messages, echo, result], tools=tools)
    state.close()
    assert MARKUP in prompt_text(engine)
    assert prompt_text(engine) == prompt_text(engine, -2)
