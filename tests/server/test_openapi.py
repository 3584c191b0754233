"""The OpenAPI document says what the routes really take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from app_client import AppClient

_REFERENCE = re.compile(r'"\$ref": "#/components/schemas/([^"]+)"')


@pytest.fixture
def document(client: AppClient) -> dict[str, Any]:
    response = client.get("/openapi.json")
    assert response.status_code == 200
    return dict(response.json())


def test_every_route_is_described_with_its_body(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    posts = {path for path, entry in document["paths"].items() if "post" in entry}
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= posts
    for path in posts:
        assert document["paths"][path]["post"]["requestBody"]["required"], path
    gets = {path for path, entry in document["paths"].items() if "get" in entry}
    assert {"/health", "/v1/models", "/v1/models/{name}", "/v1/relay/sessions/{session}"} <= gets


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    named = set(_REFERENCE.findall(json.dumps(document)))
    assert named
    assert named <= set(document["components"]["schemas"])


def test_errors_are_described_everywhere(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path


def test_fields_that_are_read_by_hand_are_described_as_they_are_read(
    document: dict[str, Any], client: AppClient
) -> None:
    schemas = document["components"]["schemas"]
    kinds = [entry["type"] for entry in schemas["ChatMessage"]["properties"]["content"]["anyOf"]]
    assert kinds == ["string", "null", "array"]
    for content in ("a", None, ["a", {"type": "text", "text": "b"}]):
        assert client.chat(messages=[{"role": "user", "content": content}]).status_code == 200
    stop = schemas["ChatCompletionRequest"]["properties"]["stop"]["anyOf"]
    assert stop[2]["maxItems"] == 4
    assert "messages" in schemas["ChatCompletionRequest"]["required"]
    assert schemas["ChatCompletionRequest"].get("additionalProperties") is not False
