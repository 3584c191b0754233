"""Every route that generates tells the runs of its prompt when it is asked to explain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_client import CHAT, AppClient

_TEXT = "a text of more than eight tokens"
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": _TEXT}]},
    "/v1/completions": {"prompt": _TEXT},
    "/v1/responses": {"input": _TEXT},
}


def relay_objects(client: AppClient, path: str, stream: bool, explain: bool) -> list[Any]:
    """All that an answer holds."""
    relay = {"policy": "shift", "explain": explain}
    body = {**_BODIES[path], "relay_session": "s", "relay": relay, "stream": stream}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()["relay"]]
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    bodies = [event.get("response", event) for event in events]
    return [body["relay"] for body in bodies if body.get("relay")]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", _BODIES)
def test_the_runs_of_a_prompt_come_with_every_kind_of_answer(
    client: AppClient, path: str, stream: bool
) -> None:
    (relay,) = relay_objects(client, path, stream, explain=True)
    kinds = [run["kind"] for run in relay["runs"]]
    assert kinds == ["prefix", "relayed", "recomputed", "computed"]
    assert [run.get("source") for run in relay["runs"]] == [
        None,
        {"request_id": "chatcmpl-0", "start": 30},
        {"request_id": "chatcmpl-0", "start": 35},
        None,
    ]
    assert "source" not in relay["runs"][0]
    lengths = [run["stop"] - run["start"] for run in relay["runs"]]
    assert dict(zip(kinds, lengths, strict=True)) == relay["tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", _BODIES)
def test_an_answer_that_need_not_explain_lists_nothing(
    client: AppClient, path: str, stream: bool
) -> None:
    (relay,) = relay_objects(client, path, stream, explain=False)
    assert not {"segments", "runs"} & set(relay)


def test_the_kinds_of_runs_are_part_of_the_api_description(client: AppClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    runs = schemas["RelayResult"]["properties"]["runs"]["items"]
    assert runs == {"$ref": "#/components/schemas/PromptRunBody"}
    assert schemas["RunKind"]["enum"] == ["prefix", "relayed", "recomputed", "computed"]
    assert schemas["PromptRunBody"]["required"] == ["kind", "start", "stop"]
