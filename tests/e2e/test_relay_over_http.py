"""Relay between agents over HTTP: the real server, the default model, the openai client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from relaykv.clients.server_process import running_server

pytestmark = pytest.mark.model

_WRITER = "You are a travel writer. You describe places in plain, exact sentences."
_READER = "You are a strict editor with thirty years of experience. You answer briefly."
_sessions = (f"session-{number}" for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Text:
    """What a producer wrote, and how many tokens that took."""

    text: str
    num_tokens: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Server:
    root: str
    client: openai.OpenAI

    def write(self, session: str, topic: str, max_tokens: int = 80) -> Text:
        answer = self.client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[
                {"role": "system", "content": _WRITER},
                {"role": "user", "content": f"Write two paragraphs about {topic}."},
            ],
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"relay_session": session},
        )
        content = answer.choices[0].message.content
        assert content
        assert answer.usage
        return Text(content, answer.usage.completion_tokens, answer.id)

    def read(
        self, messages: list[Any], session: str | None, policy: str = "relay", **extra: Any
    ) -> Any:
        """The next agent's answer as plain JSON values."""
        body: dict[str, Any] = {"relay": {"policy": policy, "store": False, "explain": True}}
        if session is not None:
            body["relay_session"] = session
        parameters: dict[str, Any] = {"max_tokens": 2, "temperature": 0, **extra}
        answer = self.client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, extra_body=body, **parameters
        )
        return answer.model_dump()


@pytest.fixture(scope="module")
def server(default_model_dir: Path) -> Iterator[Server]:
    assert default_model_dir.is_dir()
    with running_server(None) as root:
        yield Server(root, openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0))


@pytest.fixture
def session() -> str:
    return next(_sessions)


def _about(content: str, role: str = "user") -> list[Any]:
    messages: list[Any] = [
        {"role": "system", "content": _READER},
        {"role": role, "content": content},
    ]
    if role != "user":
        messages.append({"role": "user", "content": "What do you think of it?"})
    return messages


def _reused(answer: Any) -> int:
    tokens = answer["relay"]["tokens"]
    assert sum(tokens.values()) == answer["usage"]["prompt_tokens"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == tokens["prefix"] + tokens["relayed"]
    return int(tokens["relayed"] + tokens["recomputed"])


def _check_runs(answer: Any, text: Text) -> None:
    """Runs cover the prompt once and agree with the counts and the segment."""
    runs = answer["relay"]["runs"]
    borders = [run["stop"] for run in runs]
    assert [run["start"] for run in runs] == [0, *borders[:-1]]
    assert borders[-1] == answer["usage"]["prompt_tokens"]
    counts = dict.fromkeys(answer["relay"]["tokens"], 0)
    for run in runs:
        counts[run["kind"]] += run["stop"] - run["start"]
    assert counts == answer["relay"]["tokens"]
    (segment,) = answer["relay"]["segments"]
    inside = [run for run in runs if "source" in run]
    assert {run["kind"] for run in inside} == {"relayed", "recomputed"}
    assert (inside[0]["start"], inside[-1]["stop"]) == (segment["start"], segment["stop"])
    shift = segment["start"] - segment["source_start"]
    assert [run["source"] for run in inside] == [
        {"request_id": text.request_id, "start": run["start"] - shift} for run in inside
    ]
    # The policy repairs the last ten tokens of a segment, whatever else.
    assert inside[-1]["kind"] == "recomputed"
    assert inside[-1]["stop"] - inside[-1]["start"] >= 10


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_an_output_inside_a_message_of_any_role_is_relayed(
    server: Server, session: str, role: str
) -> None:
    text = server.write(session, "the harbour of Genoa")
    answer = server.read(_about(f"Here it is:\n\n{text.text}\n\nThat is all.", role), session)
    assert _reused(answer) >= 0.9 * text.num_tokens
    assert [s["source_request_id"] for s in answer["relay"]["segments"]] == [text.request_id]
    _check_runs(answer, text)


def test_a_stripped_output_is_relayed(server: Server, session: str) -> None:
    text = server.write(session, "a market hall in Porto")
    answer = server.read(_about(f"Review: {text.text.strip()} End."), session)
    assert _reused(answer) >= 0.9 * text.num_tokens


def test_a_truncated_output_is_relayed_as_far_as_it_goes(server: Server, session: str) -> None:
    text = server.write(session, "the lakes of Finland")
    kept = text.text[len(text.text) // 10 : len(text.text) * 8 // 10]
    answer = server.read(_about(f"Review this part of a text: {kept}"), session)
    assert 0.5 * text.num_tokens <= _reused(answer) <= 0.8 * text.num_tokens


def test_a_text_changed_in_the_middle_is_relayed_on_both_sides(
    server: Server, session: str
) -> None:
    text = server.write(session, "a night train to Vienna", max_tokens=120)
    words = text.text.split(" ")
    middle = len(words) // 2
    changed = " ".join([*words[:middle], "ZEBRA", "QUARTZ", *words[middle + 1 :]])
    answer = server.read(_about(f"Review:\n{changed}\nEnd."), session)
    assert len(answer["relay"]["segments"]) == 2
    assert _reused(answer) >= 0.85 * text.num_tokens


def test_two_outputs_in_the_other_order_with_an_unrelated_one_between_are_relayed(
    server: Server, session: str
) -> None:
    first = server.write(session, "the old town of Tallinn")
    server.write(session, "how bread is baked")
    second = server.write(session, "the desert of Namibia")
    prompt = f"Compare.\n\nA:\n{second.text}\n\nB:\n{first.text}\n\nWhich one is better?"
    answer = server.read(_about(prompt), session)
    sources = [s["source_request_id"] for s in answer["relay"]["segments"]]
    assert sources == [second.request_id, first.request_id]
    assert _reused(answer) >= 0.9 * (first.num_tokens + second.num_tokens)


def test_the_same_output_twice_in_a_prompt_is_relayed_twice(server: Server, session: str) -> None:
    text = server.write(session, "the bridges of Prague")
    prompt = f"Version one:\n{text.text}\n\nVersion two:\n{text.text}\n\nAre they the same?"
    answer = server.read(_about(prompt), session)
    assert _reused(answer) >= 1.8 * text.num_tokens


def test_a_document_that_one_agent_read_is_relayed_to_the_next(
    server: Server, session: str
) -> None:
    document = (
        "The ferry leaves the northern pier at six in the morning and again at four in the "
        "afternoon. It carries a hundred and twenty passengers and nine cars. In winter the "
        "second crossing is cancelled when the wind blows from the east, and the mail is left "
        "with the harbour master, who lives in the yellow house behind the ice store."
    )
    server.client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": f"Summarise.\n\n{document}"}],
        max_tokens=5,
        extra_body={"relay_session": session},
    )
    answer = server.read(_about(f"Read this notice.\n\n{document}\n\nWhen does it leave?"), session)
    assert _reused(answer) >= 50


@pytest.mark.parametrize("source", ["header", "url", "metadata"])
def test_the_session_may_come_without_a_body_field(
    server: Server, session: str, source: str
) -> None:
    text = server.write(session, "the lighthouses of Brittany")
    messages = _about(f"Review:\n\n{text.text}\n\nEnd.")
    parameters: dict[str, Any] = {"extra_body": {"relay": {"policy": "shift"}}}
    client = server.client
    if source == "header":
        parameters["extra_headers"] = {"X-Relay-Session": session}
    elif source == "metadata":
        parameters["metadata"] = {"relay_session": session}
    else:
        client = client.with_options(base_url=f"{server.root}/s/{session}/v1")
    answer = client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages, max_tokens=1, **parameters
    ).model_dump()
    assert answer["relay"]["session"] == session
    assert _reused(answer) >= 0.9 * text.num_tokens


def test_after_a_relayed_request_the_plain_prompt_gives_the_cold_answer(
    server: Server, session: str
) -> None:
    text = server.write(session, "the salt mines of Wieliczka")
    messages = _about(f"Review:\n\n{text.text}\n\nName one weakness.")
    # Another key has another cache: what it gets is what a cold server gives.
    stranger = server.client.with_options(api_key="another")
    cold = stranger.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages, max_tokens=24, temperature=0
    )
    relayed = server.read(messages, session, policy="shift", max_tokens=24)
    assert _reused(relayed) >= 0.9 * text.num_tokens
    full = server.read(messages, session, policy="full", max_tokens=24)
    plain = server.read(messages, None, max_tokens=24)
    expected = cold.choices[0].message.content
    assert plain["choices"][0]["message"]["content"] == expected
    assert full["choices"][0]["message"]["content"] == expected
    assert _reused(full) == 0
    assert plain.get("relay") is None


def test_another_key_with_the_same_session_name_has_an_empty_session(
    server: Server, session: str
) -> None:
    text = server.write(session, "the fjords of Norway")
    stranger = Server(server.root, server.client.with_options(api_key="a stranger's key"))
    answer = stranger.read(_about(f"Review:\n\n{text.text}\n\nEnd."), session)
    assert _reused(answer) == 0
    assert answer["relay"]["reason"] == "the session holds no recordings yet"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_streamed_answer_arrives_while_it_is_written(server: Server) -> None:
    started = time.monotonic()
    arrivals, last = [], None
    stream = server.client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "Tell me about rivers."}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic() - started)
        last = chunk
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == 40
    assert len(arrivals) > 20
    assert arrivals[0] < 0.5 * arrivals[-1]


def test_errors_reach_the_client_as_their_own_classes(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.chat.completions.create(
            model="gpt-unknown", messages=[{"role": "user", "content": "hi"}]
        )
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        server.client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "word " * 9000}],
        )
    assert overflow.value.code == "context_length_exceeded"
    assert "8192" in str(overflow.value)
    with pytest.raises(openai.BadRequestError) as bad:
        server.read(_about("hi"), "s", policy="magic")
    assert bad.value.param == "relay.policy"


def test_choices_of_one_request_are_equal_when_greedy(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "Count to ten."}],
        n=3,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    assert logprobs.content[0].logprob == logprobs.content[0].top_logprobs[0].logprob


def test_sessions_are_listed_and_deleted(server: Server, session: str) -> None:
    import httpx

    text = server.write(session, "the islands of Croatia")
    with httpx.Client(base_url=server.root, headers={"Authorization": "Bearer none"}) as http:
        listed = http.get("/v1/relay/sessions").json()
        assert session in str(listed)
        assert http.delete(f"/v1/relay/sessions/{session}").is_success
        assert http.get(f"/v1/relay/sessions/{session}").status_code == 404
    answer = server.read(_about(f"Review:\n\n{text.text}\n\nEnd."), session)
    assert _reused(answer) == 0
