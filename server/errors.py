"""Every failure as OpenAI's error object: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from relaykv.engine.client import EngineDeadError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

CLIENT_CLOSED_STATUS = 499  # nobody reads it; it only shows in the access log

_ABSENT_ENDPOINTS: Mapping[str, str] = {
    "/v1/embeddings": "Embeddings are out of scope: this server serves text generation only.",
}

_EXPECTED: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
}

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


class ApiError(Exception):
    """A failure with the HTTP status and the OpenAI error fields that describe it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, and the payload of an error frame in a stream."""
        kind = SERVER_ERROR if self.status >= 500 else INVALID_REQUEST
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def context_overflow(num_prompt_tokens: int, max_model_len: int, param: str) -> ApiError:
    """A 400 whose code and message both say `context_length_exceeded`: clients read either."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
        f"resulted in {num_prompt_tokens} tokens, which leaves no room for an answer. Please "
        f"reduce the length of the {param}. (context_length_exceeded)"
    )
    return bad_request(message, param=param, code="context_length_exceeded")


def engine_dead() -> ApiError:
    """A 503 for an engine that has ended: only a restart of the server helps."""
    message = "The engine has stopped; the server must be restarted."
    return ApiError(503, message, code="engine_dead", headers={"x-should-retry": "false"})


def from_validation(error: ValidationError, at: Sequence[int | str] = ()) -> ApiError:
    """The first fault of a body, in words of the API and without library internals.

    `at` is where in the body the value stood that was validated.
    """
    details = error.errors(include_url=False)[0]
    param = param_path((*at, *details["loc"]))
    code = "empty_array" if details["type"] == "too_short" else None
    return bad_request(_validation_message(details, param), param=param, code=code)


def param_path(location: Sequence[int | str]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _validation_message(details: ErrorDetails, param: str) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return f"Missing required parameter: '{param}'."
    if kind in _EXPECTED:
        got = json_kind(details["input"])
        return f"Invalid type for '{param}': expected {_EXPECTED[kind]}, but got {got} instead."
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound, shown = _plain_number(context[key]), json.dumps(details["input"])
        return f"Invalid value for '{param}': expected {words} {bound}, got {shown}."
    if kind == "too_short":
        return f"Invalid '{param}': expected at least {context['min_length']} entries."
    if kind == "literal_error":
        return f"Invalid value for '{param}': supported values are {context['expected']}."
    return f"Invalid '{param}': {details['msg']}"


def _plain_number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def json_kind(value: object) -> str:
    """What a JSON value is called in an error message."""
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (str, "a string"),
        (int, "an integer"),
        (dict, "an object"),
        (list, "an array"),
    )
    for kind, words in kinds:
        if isinstance(value, kind):
            return words
    if isinstance(value, float):
        finite = value - value == 0
        return "a number with a fraction" if finite else "NaN or Infinity"
    return "null"


def error_response(error: ApiError) -> JSONResponse:
    """The HTTP response of an error."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every way to fail answer in OpenAI's shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineDeadError, _on_engine_dead)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_engine_dead(_request: Request, _error: Exception) -> Response:
    return error_response(engine_dead())


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def _on_unexpected(_request: Request, _error: Exception) -> Response:
    # The framework logs the traceback; a client gets no internals.
    return error_response(ApiError(500, "The server had an error while processing your request."))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.scope["path"]
    if error.status_code == 404:
        message = _ABSENT_ENDPOINTS.get(path, f"Unknown request URL: {method} {path}.")
        return error_response(ApiError(404, message, code="unknown_url"))
    if error.status_code == 405:
        message = f"Method {method} is not allowed for {path}."
        headers = error.headers
        return error_response(ApiError(405, message, code="method_not_allowed", headers=headers))
    return error_response(ApiError(error.status_code, str(error.detail)))
