"""POST /v1/responses against a fake engine: inputs, answers, streams, what is kept and refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from app_client import CHAT, AppClient
from fake_engine import ByteTokenizer, FakeEngine, fake_state

from relaykv.engine.request import FinishReason
from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hi"}


def respond(client: AppClient, **fields: Any) -> httpx.Response:
    return client.post(RESPONSES, json={"input": "hi", **fields})


def answer_of(client: AppClient, **fields: Any) -> dict[str, Any]:
    response = respond(client, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def last_prompt(engine: FakeEngine) -> str:
    ids = engine.script.started[-1].prompt_token_ids
    return ByteTokenizer().decode(ids, skip_special_tokens=False)


def chat_prompt(client: AppClient, engine: FakeEngine, *messages: dict[str, Any]) -> str:
    assert client.post(CHAT, json={"messages": messages}).status_code == 200
    return last_prompt(engine)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        skipped = ("id", "created_at", "completed_at")
        return {key: without_ids(entry) for key, entry in value.items() if key not in skipped}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


def test_a_text_is_answered_with_one_message(client: AppClient, engine: FakeEngine) -> None:
    answer = answer_of(client, max_output_tokens=9, temperature=0.5, metadata={"a": "b"})
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["incomplete_details"] is None
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    part = {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert answer["usage"]["input_tokens"] == len(engine.script.started[0].prompt_token_ids)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 7
    assert answer["usage"]["output_tokens"] == 11
    assert (answer["temperature"], answer["max_output_tokens"]) == (0.5, 9)
    assert answer["metadata"] == {"a": "b"}
    request = engine.script.started[0]
    assert request.request_id == answer["id"]
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)


ITEMS: list[tuple[list[Any], list[dict[str, Any]]]] = [
    ([USER], [USER]),
    ([{"type": "message", **USER}], [USER]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [USER]),
    ([{"role": "developer", "content": "x"}, USER], [{"role": "developer", "content": "x"}, USER]),
    ([USER, {"type": "reasoning", "id": "rs_1", "summary": []}], [USER]),
    (
        [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, USER],
        [USER, {"role": "assistant", "content": "a"}, USER],
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
        ],
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "12", "tool_call_id": "c"},
        ],
    ),
    (
        [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text",
                                                                      "text": "1"}]}],
        [{"role": "tool", "content": "1", "tool_call_id": "c"}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("items", "messages"), ITEMS, ids=str)
def test_items_read_like_the_messages_they_stand_for(
    client: AppClient, engine: FakeEngine, items: list[Any], messages: list[dict[str, Any]]
) -> None:
    answer_of(client, input=items)
    prompt = last_prompt(engine)
    assert prompt == chat_prompt(client, engine, *messages)


def test_instructions_stand_in_front(client: AppClient, engine: FakeEngine) -> None:
    answer_of(client, instructions="be kind")
    prompt = last_prompt(engine)
    assert prompt == chat_prompt(client, engine, {"role": "system", "content": "be kind"}, USER)


def test_our_output_is_accepted_back_unchanged(client: AppClient, engine: FakeEngine) -> None:
    output = answer_of(client)["output"]
    answer_of(client, input=[USER, *output, USER])
    prompt = last_prompt(engine)
    answer = {"role": "assistant", "content": "Hello world"}
    assert prompt == chat_prompt(client, engine, USER, answer, USER)


def test_a_response_builds_on_an_earlier_one(client: AppClient, engine: FakeEngine) -> None:
    first = answer_of(client, instructions="be kind")
    second = answer_of(client, input=[USER], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = last_prompt(engine)
    answer = {"role": "assistant", "content": "Hello world"}
    assert prompt == chat_prompt(client, engine, USER, answer, USER)
    answer_of(client, previous_response_id=second["id"], stream=False)
    assert last_prompt(engine).count("Hello world") == 2


def test_a_streamed_response_is_kept_as_well(client: AppClient, engine: FakeEngine) -> None:
    streamed = events_of(respond(client, stream=True))[-1]["response"]
    assert client.get(f"{RESPONSES}/{streamed['id']}").json() == streamed
    answer_of(client, previous_response_id=streamed["id"])
    assert "Hello world" in last_prompt(engine)


def test_items_of_kept_responses_may_be_named(client: AppClient, engine: FakeEngine) -> None:
    item = answer_of(client)["output"][0]
    reference = {"type": "item_reference", "id": item["id"]}
    answer_of(client, input=[USER, reference, USER])
    prompt = last_prompt(engine)
    answer_of(client, input=[USER, item, USER])
    assert prompt == last_prompt(engine)
    other = client.post(RESPONSES, json={"input": [reference]}, headers={"Authorization": "x"})
    assert other.json()["error"]["param"] == "input[0].id"


def test_responses_are_shown_and_deleted_for_their_key_only(client: AppClient) -> None:
    own, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    answer = client.post(RESPONSES, json={"input": "hi"}, headers=own).json()
    path = f"{RESPONSES}/{answer['id']}"
    assert client.get(path, headers=own).json() == answer
    for method in ("GET", "DELETE"):
        assert client.request(method, path, headers=other).status_code == 404
    body = {"input": "hi", "previous_response_id": answer["id"]}
    unknown = client.post(RESPONSES, json=body, headers=other)
    assert unknown.status_code == 400
    assert unknown.json()["error"]["code"] == "previous_response_not_found"
    assert client.request("DELETE", path, headers=own).json()["deleted"] is True
    assert client.get(path, headers=own).json()["error"]["code"] == "response_not_found"


def test_what_shall_not_be_stored_is_not(client: AppClient) -> None:
    answer = answer_of(client, store=False)
    assert answer["store"] is False
    assert client.get(f"{RESPONSES}/{answer['id']}").status_code == 404


def test_a_stream_has_its_events_in_order(client: AppClient) -> None:
    events = events_of(respond(client, stream=True, relay_session="s"))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events[4:7]) == "Hello world"
    items = {event["item_id"] for event in events[3:9]} | {events[2]["item"]["id"]}
    assert items == {events[9]["item"]["id"]}
    plain = answer_of(client, relay_session="s")
    assert without_ids(events[-1]["response"]) == without_ids(plain)
    assert plain["relay"]["tokens"]["relayed"] == 5


def test_an_answer_cut_by_length_is_incomplete(client: AppClient, engine: FakeEngine) -> None:
    engine.script.finish = FinishReason.LENGTH
    plain = answer_of(client)
    last = events_of(respond(client, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert plain["incomplete_details"] == {"reason": "max_output_tokens"}
    assert plain["output"][0]["status"] == "incomplete"
    assert without_ids(last["response"]) == without_ids(plain)


def test_an_empty_answer_is_a_message_without_text(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces = ("",)
    plain = answer_of(client)
    assert plain["output"][0]["content"][0]["text"] == ""
    last = events_of(respond(client, stream=True))[-1]
    assert without_ids(last["response"]) == without_ids(plain)


def test_logprobs_come_when_asked_for(client: AppClient) -> None:
    for fields in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}):
        plain = answer_of(client, **fields)
        logprobs = plain["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs) == "Hello world"
        events = events_of(respond(client, stream=True, **fields))
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == logprobs
        assert without_ids(events[-1]["response"]) == without_ids(plain)


def test_a_failure_in_a_stream_is_a_failed_response(client: AppClient, engine: FakeEngine) -> None:
    engine.script.raises = RuntimeError("secret")
    response = respond(client, stream=True)
    last = events_of(response)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in response.text
    assert client.get(f"{RESPONSES}/{last['response']['id']}").status_code == 404
    assert respond(client).status_code == 500


def test_silence_is_filled_with_comments(engine: FakeEngine) -> None:
    engine.script.delay_s = 0.1
    state = fake_state(engine, ServerSettings(keepalive_s=0.03))
    response = respond(AppClient(create_app(state)), stream=True)
    state.close()
    assert response.text.split("\n\n")[2] == ": keepalive"


@pytest.mark.parametrize("source", ["body", "header", "url", "metadata"])
def test_a_session_is_taken_from_every_source(
    client: AppClient, engine: FakeEngine, source: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "body": {"relay_session": "s"},
        "metadata": {"metadata": {"relay_session": "s"}},
    }
    fields = bodies.get(source, {})
    headers = {"X-Relay-Session": "s"} if source == "header" else {}
    path = f"/s/s{RESPONSES}/" if source == "url" else RESPONSES
    body = {"input": "hi", "relay": {"policy": "shift"}, **fields}
    answer = client.post(path, json=body, headers=headers).json()
    assert (answer["relay"]["session"], answer["relay"]["policy"]) == ("s", "shift")
    assert engine.script.started[0].relay.session == "s"


@pytest.mark.parametrize("name", ["org/tiny", "tiny", "openai/org/tiny", "openai/tiny"])
def test_every_name_of_the_model_is_accepted(client: AppClient, name: str) -> None:
    assert answer_of(client, model=name)["model"] == "org/tiny"
    assert respond(client, model="nope").status_code == 404


def call(**fields: Any) -> dict[str, Any]:
    whole = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {**whole, **fields}


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 5}),
    ("input", {"input": []}),
    ("input", {"input": "x" * 400}),
    ("input", {"input": "refuse"}),
    ("input[0]", {"input": ["hi"]}),
    ("input[1].role", {"input": [USER, {"role": "banana", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].type", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
    ("input[0].type", {"input": [{"type": 5}]}),
    ("input[0].call_id", {"input": [call(call_id=None)]}),
    ("input[0].name", {"input": [call(name=5)]}),
    ("input[0].arguments", {"input": [call(arguments={})]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c",
                                    "output": {}}]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_x"}]}),
    ("instructions", {"instructions": ["be"]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("previous_response_id", {"previous_response_id": "resp_x"}),
    ("previous_response_id", {"previous_response_id": 5}),
    ("temperature", {"temperature": 3}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("text.format.type", {"text": {"format": {"type": "yaml"}}}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": {"type": "web_search"}}),
    ("tool_choice", {"tool_choice": "maybe"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("relay.policy", {"relay": {"policy": "nope"}}),
    ("metadata.relay_session", {"metadata": {"relay_session": 5}}),
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_field_is_a_400_that_names_it(
    client: AppClient, engine: FakeEngine, param: str, fields: dict[str, Any], is_stream: bool
) -> None:
    response = respond(client, **fields, stream=is_stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "messages" not in error["message"].replace("refused the messages", "")
    assert engine.script.started == []


def test_half_a_surrogate_pair_is_refused(client: AppClient) -> None:
    bodies = (
        (rb'{"input": "\ud83d"}', "input"),
        (rb'{"input": "a", "instructions": "\ud83d"}', "instructions"),
        (rb'{"input": [{"role": "user", "content": "\ud83d"}]}', "input[0].content"),
        (rb'{"input": [{"type": "item_reference", "id": "\ud83d"}]}', "input[0].id"),
        (rb'{"input": "a", "metadata": {"a": "\uD83D"}}', "metadata.a"),
        (rb'{"input": "a", "metadata": {"\ud83d": "a"}}', "metadata"),
        (rb'{"input": "a", "previous_response_id": "\udfff"}', "previous_response_id"),
        (rb'{"input": "a", "tools": [{"type": "\ud83d"}]}', "tools[0].type"),
        (rb'{"input": "a", "model": "\ud83d"}', "model"),
    )
    for content, param in bodies:
        response = client.post(RESPONSES, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    whole = client.post(
        RESPONSES, content=rb'{"input": "\ud83d\ude00", "metadata": {"a": "\\ud83d"}}'
    )
    assert whole.json()["metadata"] == {"a": "\\ud83d"}


HARMLESS: list[dict[str, Any]] = [
    {"background": False, "truncation": "auto", "reasoning": {"effort": "low"}, "include": []},
    {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "text": {"verbosity": "low"},
    },
    {"text": {"format": {"type": "text"}}, "service_tier": "auto", "user": "u", "unknown": 1},
    {"prompt_cache_key": "k", "store": None, "previous_response_id": "", "max_tool_calls": 3},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda value: json.dumps(value)[:60])
def test_fields_that_change_nothing_are_ignored(client: AppClient, fields: dict[str, Any]) -> None:
    assert answer_of(client, **fields)["status"] == "completed"
