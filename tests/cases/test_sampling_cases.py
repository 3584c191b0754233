"""Area 4: sampling parameters. The names of the tests are ids of docs/cases.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_client import CHAT, AppClient
from byte_server import NUM_TOKENS, ByteServer, byte_backend, byte_server, save_byte_model
from events import error_of, read_stream
from fake_engine import FakeEngine

from relaykv.engine.assembly import prepare
from relaykv.engine.options import EngineOptions

USER = {"role": "user", "content": "Say red green blue red green blue"}
SLOW: dict[str, Any] = {"messages": [USER], "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ByteServer]:
    with byte_server() as running:
        yield running
        running.assert_idle()


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    assert choice["index"] == index
    return str(choice["message"]["content"])


def ids_of(answer: dict[str, Any]) -> list[Any]:
    """The bytes of every token, which text with U+FFFD would hide."""
    return [entry["bytes"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("token_id", [99999999, -1, NUM_TOKENS, NUM_TOKENS + 5])
def test_sp_01_a_bias_for_a_token_that_does_not_exist_is_refused(
    server: ByteServer, token_id: int
) -> None:
    error = error_of(server.client.chat(logit_bias={str(token_id): 1}), 400)
    assert error["param"] == "logit_bias"
    alone = server.client.chat(**SLOW, temperature=0).json()
    assert text_of(alone) == text_of(server.chat_all([{**SLOW, "temperature": 0}] * 2)[1])


def test_sp_01_padded_logits_are_no_tokens(tmp_path: Path) -> None:
    save_byte_model(tmp_path)
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    parts = prepare(EngineOptions(model=str(tmp_path), kv_memory_bytes=2**20, max_model_len=64))
    assert parts.model.config.vocab_size > NUM_TOKENS
    assert parts.card.vocab_size == NUM_TOKENS


WRONG: list[tuple[str, str]] = [
    *(("temperature", text) for text in ("NaN", "Infinity", "-1", "2.1", '"0.5"', "true")),
    *(("top_p", text) for text in ("0", "1.5", "NaN")),
    ("min_p", "2"),
    ("presence_penalty", "3"),
    ("frequency_penalty", "-9"),
    ("repetition_penalty", "1e-308"),
    *(("n", text) for text in ("0", "-1", "10000")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_sp_03_numbers_out_of_range_are_refused_by_name(
    client: AppClient, engine: FakeEngine, field: str, value: str
) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}], "' + field + '": ' + value + "}"
    assert error_of(client.post(CHAT, content=body), 400)["param"] == field
    assert engine.script.started == []


def test_sp_05_greedy_choices_are_equal_and_numbered(server: ByteServer) -> None:
    body = {**SLOW, "n": 3, "temperature": 0}
    answer = server.client.chat(**body).json()
    texts = [text_of(answer, index) for index in range(3)]
    assert len(set(texts)) == 1
    usage = answer["usage"]
    alone = server.client.chat(**SLOW).json()["usage"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["completion_tokens"] == 3 * 40
    stream = read_stream(server.client.chat(**body, stream=True))
    assert [stream.texts[index] for index in range(3)] == texts
    assert stream.reasons == {0: ["length"], 1: ["length"], 2: ["length"]}


def test_sp_05_and_json_each_choice_has_a_grammar_of_its_own(server: ByteServer) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    body = {
        "messages": [USER],
        "n": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}},
    }
    answer = server.client.chat(**body, seed=1).json()
    stream = read_stream(server.client.chat(**body, seed=1, stream=True))
    for index in range(3):
        assert json.loads(text_of(answer, index))["a"] in (1, 22, 333)
        assert stream.texts[index] == text_of(answer, index)


def test_sp_06_a_seed_gives_the_same_answer_alone_cached_and_in_company(
    server: ByteServer,
) -> None:
    others = [
        {"messages": [{"role": "user", "content": f"other {number}"}], "max_tokens": 30 + number}
        for number in range(8)
    ]
    for fields in ({"temperature": 1.0, "seed": 42}, {"temperature": 0}):
        content = f"{fields['temperature']}: nobody has sent this prompt"
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 30,
            "logprobs": True,
            **fields,
        }
        answers = [server.client.chat(**body).json() for _ in range(3)]
        assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        answers.append(server.chat_all([*others, body])[-1])
        assert all(ids_of(answer) == ids_of(answers[0]) for answer in answers)


@pytest.mark.parametrize("penalty", ["repetition", "frequency", "presence"])
def test_sp_07_penalties_count_the_same_cold_warm_and_in_a_session(
    server: ByteServer, penalty: str
) -> None:
    body = {
        "messages": [{"role": "user", "content": f"{penalty}: the word word word word"}],
        "max_tokens": 40,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
    }
    strength = {f"{penalty}_penalty": 1.3 if penalty == "repetition" else 1.5}
    cold = server.client.chat(**body, **strength).json()
    warm = server.client.chat(**body, **strength).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for session in ("penalties", "penalties"):
        again = server.client.chat(**body, **strength, relay_session=session).json()
        assert ids_of(again) == ids_of(cold)
    assert ids_of(warm) == ids_of(cold)
    both = server.client.chat(**body, **strength, n=2).json()
    assert text_of(both, 0) == text_of(both, 1) == text_of(cold)
    assert ids_of(server.client.chat(**body).json()) != ids_of(cold)
    assert len(set(map(str, ids_of(cold)))) > len(
        set(map(str, ids_of(server.client.chat(**body).json())))
    )


@pytest.mark.parametrize("limit", [0, -5, 1.5, "16", True])
def test_sp_08_a_limit_that_is_no_positive_integer_is_refused(
    client: AppClient, engine: FakeEngine, limit: Any
) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        assert error_of(client.chat(**{field: limit}), 400)["param"] == field
    assert engine.script.started == []
    assert client.chat(max_tokens=None).status_code == 200


def test_sp_08_echo_of_the_prompt_alone_is_refused_and_harms_nobody(server: ByteServer) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}
    error_of(server.client.post("/v1/completions", json=body), 400)
    assert server.client.chat(max_tokens=1).status_code == 200


def test_sp_09_the_newer_limit_counts_and_wins(server: ByteServer) -> None:
    for fields in (
        {"max_completion_tokens": 5},
        {"max_completion_tokens": 5, "max_tokens": 9},
        {"max_completion_tokens": 5, "max_tokens": 2},
    ):
        answer = server.client.chat(**fields, ignore_eos=True).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "stop", ["", [""], [1], list("abcde"), list("abcdefghijklmnopqrst"), 1, {}]
)
def test_sp_10_stops_that_cannot_be_meant_are_refused(client: AppClient, stop: Any) -> None:
    assert error_of(client.chat(stop=stop), 400)["param"] == "stop"


def test_sp_10_no_stop_is_no_stop(server: ByteServer) -> None:
    plain = text_of(server.client.chat(**SLOW, temperature=0).json())
    for stop in ([], None, ["\n\n\n\n"], list("☃☄★☆")):
        assert text_of(server.client.chat(**SLOW, temperature=0, stop=stop).json()) == plain


FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "schema": {"type": "object"}},
    {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}},
    {"type": "yaml"},
    {"type": 5},
    {},
]


@pytest.mark.parametrize("response_format", FORMATS)
def test_sp_11_a_format_that_is_none_is_refused_before_anything_is_generated(
    client: AppClient, engine: FakeEngine, response_format: dict[str, Any]
) -> None:
    error = error_of(client.chat(response_format=response_format), 400)
    assert error["param"].startswith("response_format")
    assert engine.script.started == []
