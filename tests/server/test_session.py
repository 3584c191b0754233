"""Where a session comes from, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from app_client import CHAT, AppClient
from fake_engine import FakeEngine


def chat_session(
    client: AppClient,
    engine: FakeEngine,
    path: str = CHAT,
    headers: Mapping[str, str | bytes] | None = None,
    **fields: object,
) -> str | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return engine.script.started[-1].relay.session


def test_the_sources_count_in_their_order(client: AppClient, engine: FakeEngine) -> None:
    path, headers = f"/s/url{CHAT}", {"X-Relay-Session": "header"}
    metadata = {"relay_session": "metadata"}
    everything = {"relay_session": "body", "metadata": metadata}
    assert chat_session(client, engine, path, headers, **everything) == "body"
    assert chat_session(client, engine, path, headers, metadata=metadata) == "header"
    assert chat_session(client, engine, path, metadata=metadata) == "url"
    assert chat_session(client, engine, metadata=metadata) == "metadata"
    assert chat_session(client, engine) is None


def test_empty_names_do_not_count(client: AppClient, engine: FakeEngine) -> None:
    headers = {"X-Relay-Session": ""}
    session = chat_session(client, engine, f"/s/url{CHAT}", headers, relay_session="")
    assert session == "url"
    assert chat_session(client, engine, relay_session="", metadata={"relay_session": ""}) is None


def test_names_may_hold_any_visible_text(client: AppClient, engine: FakeEngine) -> None:
    assert chat_session(client, engine, f"/s/a%2Fb%20%C3%A9{CHAT}/") == "a/b é"
    headers = {"X-Relay-Session": "é".encode()}
    assert chat_session(client, engine, headers=headers) == "é"
    assert chat_session(client, engine, relay_session="x" * 256) == "x" * 256


@pytest.mark.parametrize("name", ["a%0Ab", "%FF", "x" * 257, "%7F"])
def test_a_bad_name_in_the_url_is_a_400(client: AppClient, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = client.post(f"/s/{name}{CHAT}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session"


def test_a_bad_name_in_the_header_names_the_header(client: AppClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = client.post(CHAT, json=body, headers={"X-Relay-Session": "x" * 257})
    assert response.json()["error"]["param"] == "X-Relay-Session"


def test_the_tenant_is_a_digest_of_the_key(client: AppClient, engine: FakeEngine) -> None:
    for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer one"}):
        chat_session(client, engine, headers=header)
    chat_session(client, engine, headers={"Authorization": "bearer  one"})
    chat_session(client, engine, headers={"Authorization": "Bearer two"})
    none, empty, one, same, two = (request.tenant for request in engine.script.started)
    assert none == empty == ""
    assert one == same
    assert len({"", one, two}) == 3
    assert "one" not in one
