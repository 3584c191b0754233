"""POST /v1/completions: prompts of every kind, echo, log-probabilities, streams and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from app_client import AppClient
from fake_engine import ByteTokenizer, ChatMlTemplate, FakeEngine, Script, fake_state
from live_server import live_server

from relaykv.engine.request import FinishReason
from relaykv.server.app import create_app
from relaykv.server.prompt import PromptBuilder
from relaykv.server.settings import ServerSettings
from relaykv.server.state import Backend, ServerState

COMPLETIONS = "/v1/completions"


def complete(client: AppClient, **fields: Any) -> httpx.Response:
    return client.post(COMPLETIONS, json={"prompt": "hi", **fields})


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_text_is_continued_as_it_stands(client: AppClient, engine: FakeEngine) -> None:
    answer = complete(client).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = {"text": "Hello world", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 11
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert "relay" not in answer
    request = engine.script.started[0]
    assert request.prompt_token_ids == (104, 105)
    assert request.sampling.max_tokens == 16


PROMPTS: list[tuple[Any, list[tuple[int, ...]]]] = [
    (["hi"], [(104, 105)]),
    (["hi", "a"], [(104, 105), (97,)]),
    ([104, 105], [(104, 105)]),
    ([[104, 105], [97]], [(104, 105), (97,)]),
    ("<|im_start|>a", [(256, 97)]),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS, ids=str)
def test_every_form_of_a_prompt_is_read(
    client: AppClient, engine: FakeEngine, prompt: Any, ids: list[tuple[int, ...]]
) -> None:
    answer = complete(client, prompt=prompt).json()
    assert [request.prompt_token_ids for request in engine.script.started] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_every_prompt_has_n_answers_and_counts_once(client: AppClient, engine: FakeEngine) -> None:
    answer = complete(client, prompt=["a", "bcd"], n=2, seed=5, echo=True).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aHello world"] * 2 + ["bcdHello world"] * 2
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 44
    seeds = {(r.prompt_token_ids, r.sampling.seed) for r in engine.script.started}
    assert seeds == {((97,), 5), ((97,), 6), ((98, 99, 100), 5), ((98, 99, 100), 6)}


def test_echo_of_token_ids_is_their_text(client: AppClient) -> None:
    answer = complete(client, prompt=[256, 104, 105], echo=True).json()
    assert answer["choices"][0]["text"] == "<|im_start|>hiHello world"


def test_logprobs_come_in_four_lists(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces = ("a", "é")
    logprobs = complete(client, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"\0": -0.5, "a": -0.5}
    only_chosen = complete(client, logprobs=0).json()["choices"][0]["logprobs"]
    assert only_chosen["top_logprobs"][0] == {"a": -0.5}


def test_a_stream_adds_up_to_the_plain_answer(client: AppClient, engine: FakeEngine) -> None:
    engine.script.pieces = ("a\u2028", "", "é", "b")
    fields: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "logprobs": 2}
    plain = complete(client, **fields).json()
    options = {"include_usage": True}
    *chunks, last = chunks_of(complete(client, **fields, stream=True, stream_options=options))
    assert last["usage"] == plain["usage"]
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, expected in enumerate(plain["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
        for key, values in expected["logprobs"].items():
            streamed = [part["logprobs"][key] for part in parts if part["logprobs"]]
            assert [value for piece in streamed for value in piece] == values


def test_an_echo_with_log_probabilities_holds_those_of_the_prompt(client: AppClient) -> None:
    answer = complete(client, prompt="hé", echo=True, logprobs=0).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "héHello world"
    assert logprobs["tokens"][:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"][:4] == [None, -0.25, -0.25, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"bytes:\\xc3": -0.25}]
    assert logprobs["text_offset"][:5] == [0, 1, 1, 2, 3]
    assert {len(values) for values in logprobs.values()} == {3 + len("Hello world")}


def test_a_stream_echoes_log_probabilities_as_the_plain_answer_does(client: AppClient) -> None:
    plain = complete(client, prompt="abc", echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    chunks = chunks_of(complete(client, prompt="abc", echo=True, logprobs=1, stream=True))
    streamed: dict[str, list[Any]] = {name: [] for name in plain}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == plain


def test_a_stream_starts_with_the_echo(client: AppClient) -> None:
    chunks = chunks_of(complete(client, stream=True, echo=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hiHel", "lo", " world", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert not any("usage" in chunk for chunk in chunks)


def test_a_failure_in_a_stream_is_its_last_event(client: AppClient, engine: FakeEngine) -> None:
    engine.script.finish, engine.script.error = FinishReason.ERROR, "out of blocks"
    last = complete(client, stream=True).text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "out of blocks"


def test_silence_is_filled_with_comments(engine: FakeEngine) -> None:
    engine.script.delay_s = 0.1
    state = fake_state(engine, ServerSettings(keepalive_s=0.03))
    assert complete(AppClient(create_app(state)), stream=True).text.startswith(": keepalive\n\n")
    state.close()


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
    path = f"/s/s{COMPLETIONS}/" if source == "url" else COMPLETIONS
    body = {"prompt": ["a", "b"], "relay": {"policy": "shift", "explain": True}, **fields}
    answer = client.post(path, json=body, headers=headers).json()
    assert answer["relay"]["session"] == "s"
    assert answer["relay"]["policy"] == "shift"
    assert answer["relay"]["segments"][0]["start"] == 2
    assert [choice["relay"]["session"] for choice in answer["choices"]] == ["s", "s"]
    assert {request.relay.session for request in engine.script.started} == {"s"}
    chunks = chunks_of(client.post(path, json={**body, "stream": True}, headers=headers))
    assert [chunk["relay"]["session"] for chunk in chunks if "relay" in chunk] == ["s"]


@pytest.mark.parametrize("name", ["org/tiny", "tiny", "openai/org/tiny", "openai/tiny"])
def test_every_name_of_the_model_is_accepted(client: AppClient, name: str) -> None:
    assert complete(client, model=name).json()["model"] == "org/tiny"
    assert complete(client, model="nope").status_code == 404


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": ["a", [5]]}),
    ("prompt", {"prompt": [5, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [5, -1]}),
    ("prompt", {"prompt": [300]}),
    ("prompt", {"prompt": [[5], [2**70]]}),
    ("prompt", {"prompt": [None]}),
    ("prompt", {"prompt": ["a"] * 129}),
    ("prompt", {"prompt": "x" * 400}),
    ("n", {"n": 0}),
    ("n", {"n": 16, "prompt": ["a"] * 9}),
    ("max_tokens", {"max_tokens": 0}),
    ("logprobs", {"logprobs": 6}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": 1}),
    ("best_of", {"best_of": 3, "n": 2}),
    ("suffix", {"suffix": "end"}),
    ("temperature", {"temperature": 3}),
    ("stop", {"stop": [""]}),
    ("relay.policy", {"relay": {"policy": "nope"}}),
    ("relay_session", {"relay_session": 5}),
    ("response_format", {"response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_field_is_a_400_that_names_it(
    client: AppClient, engine: FakeEngine, param: str, fields: dict[str, Any], is_stream: bool
) -> None:
    response = complete(client, **fields, stream=is_stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.script.started == []


def test_a_missing_prompt_and_half_a_surrogate_pair_are_refused(client: AppClient) -> None:
    bodies = (
        (b"{}", "prompt"),
        (rb'{"prompt": "\ud83d"}', "prompt"),
        (rb'{"prompt": ["a", "\ud83d"]}', "prompt[1]"),
    )
    for content, param in bodies:
        response = client.post(COMPLETIONS, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}, {"suffix": None}, {"user": "u"}],
    ids=str,
)
def test_fields_that_change_nothing_are_ignored(client: AppClient, fields: dict[str, Any]) -> None:
    assert complete(client, **fields).status_code == 200


def test_the_leading_token_is_there_exactly_once() -> None:
    class WithLeading(ByteTokenizer):
        leading_ids = (256,)

    engine = FakeEngine()
    prompts = PromptBuilder(ChatMlTemplate(), WithLeading())
    state = ServerState(ServerSettings(), Backend(engine, prompts))
    client = AppClient(create_app(state))
    for prompt in ("a", "<|im_start|>a", [97]):
        assert complete(client, prompt=prompt).status_code == 200
    state.close()
    asked = [request.prompt_token_ids for request in engine.script.started]
    assert asked == [(256, 97), (256, 97), (97,)]


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    engine = FakeEngine()
    with (
        live_server(fake_state(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, engine


def test_the_openai_package_reads_answers_and_streams(
    api: tuple[openai.OpenAI, FakeEngine],
) -> None:
    client, _ = api
    answer = client.completions.create(model="tiny", prompt="hi", logprobs=2)
    assert answer.choices[0].text == "Hello world"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert "".join(answer.choices[0].logprobs.tokens) == "Hello world"
    stream = client.completions.create(
        model="tiny", prompt="hi", stream=True, extra_body={"relay_session": "s"}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["relay"]["session"] == "s"


def test_the_openai_package_raises_our_errors(api: tuple[openai.OpenAI, FakeEngine]) -> None:
    client, engine = api
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="hi", suffix="x")
    assert (bad.value.param, bad.value.code) == ("suffix", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 500)
    assert long.value.code == "context_length_exceeded"
    engine.script = Script(raises=RuntimeError("x"))
    with pytest.raises(openai.APIError, match="The server had an error"):
        list(client.completions.create(model="tiny", prompt="hi", stream=True))
    engine.script = Script()
