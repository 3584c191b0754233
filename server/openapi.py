"""The OpenAPI document, from the types that read the bodies and write the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from relaykv.server.protocol import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from relaykv.server.response_protocol import ResponseRequest
from relaykv.server.responses import ChatCompletion
from relaykv.server.session import MAX_SESSION_LENGTH, SESSION_HEADER
from relaykv.server.text_protocol import TextCompletionRequest

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": TextCompletionRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ANSWERS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
}
_NULLABLE_STRING: Mapping[str, Any] = {"type": ["string", "null"]}
_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            },
        }
    },
}
_SESSION: Mapping[str, Any] = {
    "name": SESSION_HEADER,
    "in": "header",
    "required": False,
    "description": "The relay session, when the body does not name one.",
    "schema": {"type": "string", "maxLength": MAX_SESSION_LENGTH},
}
_ERROR_ANSWER: Mapping[str, Any] = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


async def show_openapi(request: Request) -> JSONResponse:
    """This document."""
    return JSONResponse(openapi_document(request.app))


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Describes every route of the application.

    The bodies are read by hand, so that the framework knows only paths and methods.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = {*_BODIES.values(), *_ANSWERS.values()}
    references, schemas = models_json_schema(
        # As they are read: a field that has a default may be missing, in answers too.
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    document["components"] = {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            body, answer = _BODIES.get(path), _ANSWERS.get(path)
            if body is not None:
                content = {"application/json": {"schema": references[body, "validation"]}}
                operation["requestBody"] = {"required": True, "content": content}
            schema = {"type": "object"} if answer is None else references[answer, "validation"]
            _describe(operation, schema, body)
    return document


def _describe(operation: dict[str, Any], schema: Any, body: type[BaseModel] | None) -> None:
    """Puts answers, errors and the session's header into an operation, in place."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if body is not None and "stream" in body.model_fields:
        # No type: readers disagree whether it is the whole text or one event.
        events = {"description": "With `stream`: an event for every piece, then `[DONE]`."}
        content["text/event-stream"] = {"schema": events}
        operation.setdefault("parameters", []).append(_SESSION)
    operation["responses"] = {
        "200": {"description": "The answer", "content": content},
        "4XX": _ERROR_ANSWER,
        "5XX": _ERROR_ANSWER,
    }
