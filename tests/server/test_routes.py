"""Models, tokens, health, relay sessions, and the ids of requests."""

from __future__ import annotations

from typing import Any

import pytest
from app_client import CHAT, AppClient
from fake_engine import MAX_MODEL_LEN, FakeEngine, fake_state

from relaykv.engine.client import ShadowSummary
from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import BandsSource, ChosenBands
from relaykv.server.app import create_app
from relaykv.server.settings import ServerSettings
from relaykv.server.state import ServerState

USER = {"role": "user", "content": "hi"}


def test_the_model_is_listed_with_an_alias_free_of_slashes(client: AppClient) -> None:
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["org/tiny", "tiny"]
    assert models["data"][0]["object"] == "model"
    assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN


def test_a_name_without_a_slash_is_listed_once() -> None:
    state = fake_state(FakeEngine(name="tiny"))
    models = AppClient(create_app(state)).get("/v1/models/").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    state.close()


@pytest.mark.parametrize("name", ["org/tiny", "org%2Ftiny", "tiny", "openai/org/tiny"])
def test_a_model_is_shown_under_each_of_its_names(client: AppClient, name: str) -> None:
    response = client.get(f"/s/a/v1/models/{name}")
    assert response.status_code == 200
    assert response.json()["object"] == "model"


def test_an_unknown_model_is_not_shown(client: AppClient) -> None:
    response = client.get("/v1/models/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_messages_and_text_are_tokenised_as_chat_sees_them(
    client: AppClient, engine: FakeEngine
) -> None:
    client.chat()
    answer = client.post("/tokenize", json={"messages": [USER]}).json()
    assert answer["tokens"] == list(engine.script.started[0].prompt_token_ids)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert client.post("/tokenize", json={"text": "hi"}).json()["tokens"] == [104, 105]
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


@pytest.mark.parametrize("body", [{}, {"text": "a", "messages": [USER]}, {"text": 3}])
def test_tokenize_wants_either_text_or_messages(client: AppClient, body: dict[str, Any]) -> None:
    response = client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text"


def test_half_a_surrogate_pair_cannot_be_tokenised(client: AppClient) -> None:
    response = client.post("/tokenize", content=rb'{"text": "\ud83d"}')
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text"


def test_token_ids_become_text(client: AppClient) -> None:
    response = client.post("/detokenize", json={"tokens": [256, 104, 105]})
    assert response.json() == {"text": "<|im_start|>hi"}
    assert client.post("/detokenize", json={"tokens": [300]}).status_code == 400
    assert client.post("/detokenize", json={"tokens": ["a"]}).status_code == 400


def test_a_server_without_its_model_is_alive_and_not_ready() -> None:
    state = ServerState(ServerSettings(retry_after_s=7))
    client = AppClient(create_app(state))
    assert client.get("/health").status_code == 200
    for response in (client.get("/ready"), client.chat(), client.get("/v1/models")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        assert response.headers["retry-after"] == "7"


def test_attaching_the_backend_makes_a_server_ready(engine: FakeEngine) -> None:
    state = ServerState(ServerSettings())
    client = AppClient(create_app(state))
    loaded = fake_state(engine).backend()
    state.attach(loaded)
    assert client.get("/ready").status_code == 200
    assert client.chat().status_code == 200
    engine.ready = False
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    state.close()


def test_health_fails_after_the_engine_has_died(client: AppClient, engine: FakeEngine) -> None:
    engine.alive = False
    assert client.get("/health").status_code == 503
    assert client.get("/ready").json()["error"]["code"] == "engine_dead"


def test_relay_tells_policies_and_the_default(client: AppClient) -> None:
    answer = client.get("/v1/relay").json()
    assert answer["policies"] == ["full", "shift", "relay"]
    assert answer["default_policy"] == answer["started_with_policy"] == "auto"
    assert answer["model"] == "org/tiny"


def test_relay_tells_how_far_answers_drifted_and_what_sessions_get_now(
    client: AppClient, engine: FakeEngine
) -> None:
    summary = ShadowSummary("auto", 20, 0.07, 0.3, 0.9)
    engine.moved = ("auto@0.25", (summary,))
    answer = client.get("/v1/relay").json()
    assert answer["default_policy"] == "auto@0.25"
    assert answer["started_with_policy"] == "auto"
    assert answer["shadow"] == {
        "policies": [
            {
                "policy": "auto",
                "num_runs": 20,
                "mean_kl": 0.07,
                "max_kl": 0.3,
                "agreement": 0.9,
            }
        ],
        "waiting": 0,
        "dropped": 0,
    }


def test_relay_tells_the_bands_and_where_they_come_from(
    client: AppClient, engine: FakeEngine
) -> None:
    answer = client.get("/v1/relay").json()
    assert answer["bands"] == {"inject": 1, "select": 3, "stop": 6}
    assert answer["bands_source"] == "own profile"
    assert answer["profile"] == "profile.json"
    assert answer["fingerprint"] == "0123456789abcdef"
    engine.relay_bands = ChosenBands(Bands(0, 2, 7), BandsSource.DEFAULT, "f")
    answer = client.get("/v1/relay").json()
    assert (answer["bands_source"], answer["profile"]) == ("safe default", None)


def test_sessions_are_listed_shown_and_deleted_for_their_key(
    client: AppClient, engine: FakeEngine
) -> None:
    headers = {"Authorization": "Bearer key"}
    sessions = client.get("/v1/relay/sessions", headers=headers).json()["data"]
    assert [session["id"] for session in sessions] == ["team/a"]
    assert sessions[0]["recordings"][0]["num_output_tokens"] == 5
    assert client.get("/v1/relay/sessions/team%2Fa").json() == sessions[0]
    assert client.get("/v1/relay/sessions/other").status_code == 404
    deleted = client.request("DELETE", "/v1/relay/sessions/team/a", headers=headers)
    assert deleted.json()["deleted"] is True
    assert engine.deleted == [(engine.tenants[0], "team/a")]
    assert engine.tenants[0] != engine.tenants[1] == ""
    missing = client.request("DELETE", "/v1/relay/sessions/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "session_not_found"


def test_every_answer_carries_a_request_id(client: AppClient) -> None:
    own = client.get("/health").headers["x-request-id"]
    assert own.startswith("req_")
    sent = client.get(CHAT, headers={"X-Request-Id": "abc-1"})
    assert sent.headers["x-request-id"] == "abc-1"
    bad = client.get("/health", headers={"X-Request-Id": "a b"})
    assert bad.headers["x-request-id"].startswith("req_")
