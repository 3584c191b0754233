"""Relay through /v1/completions and /v1/responses: the real server and the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from relaykv.clients.server_process import running_server

pytestmark = pytest.mark.model

_MODEL = "SmolLM2-135M-Instruct"
_TASK = "Write a paragraph about the harbour of a small town."
_REVIEW = "You are a strict editor. Review this draft:\n\n{draft}\n\nName its worst sentence."


@pytest.fixture(scope="module")
def api(default_model_dir: Path) -> Iterator[openai.OpenAI]:
    assert default_model_dir.is_dir()
    with (
        running_server(None) as root,
        openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def test_what_a_text_completion_wrote_is_relayed_into_another(api: openai.OpenAI) -> None:
    body = {"relay_session": "completions"}
    first = api.completions.create(
        model=_MODEL, prompt=f"{_TASK}\n\n", max_tokens=48, temperature=0, extra_body=body
    )
    assert first.usage is not None
    stream = api.completions.create(
        model=_MODEL,
        prompt=_REVIEW.format(draft=first.choices[0].text),
        max_tokens=2,
        temperature=0,
        stream=True,
        extra_body=body,
    )
    last = list(stream)[-1]
    assert last.model_extra is not None
    tokens = last.model_extra["relay"]["tokens"]
    assert tokens["relayed"] + tokens["recomputed"] > 0.6 * first.usage.completion_tokens


def test_what_a_response_wrote_is_relayed_into_another(api: openai.OpenAI) -> None:
    body = {"relay_session": "responses"}
    first = api.responses.create(
        model=_MODEL, input=_TASK, max_output_tokens=48, temperature=0, extra_body=body
    )
    assert first.usage is not None
    with api.responses.stream(
        model=_MODEL,
        instructions="You are a strict editor.",
        input=_REVIEW.format(draft=first.output_text),
        max_output_tokens=2,
        temperature=0,
        extra_body=body,
    ) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.model_extra is not None
    tokens = last.response.model_extra["relay"]["tokens"]
    assert tokens["relayed"] + tokens["recomputed"] > 0.6 * first.usage.output_tokens
    assert last.response.usage is not None
    assert last.response.usage.input_tokens_details.cached_tokens > 0


def test_a_response_that_builds_on_another_hits_its_prefix(api: openai.OpenAI) -> None:
    first = api.responses.create(model=_MODEL, input=_TASK, max_output_tokens=24, temperature=0)
    assert first.usage is not None
    second = api.responses.create(
        model=_MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=2
    )
    assert second.usage is not None
    cached_tokens = second.usage.input_tokens_details.cached_tokens
    assert cached_tokens > 0.7 * (first.usage.input_tokens + first.usage.output_tokens)
