"""Reads a request's body as a JSON object, whatever its Content-Type says."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from relaykv.server.errors import ApiError, bad_request, from_validation, json_kind, param_path

_LARGE_BODY_BYTES = 256 * 1024  # parsed beside the event loop from here on

# Strict UTF-8 holds no surrogates; only escapes can spell them.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, model: type[Model], max_body_bytes: int) -> Model:
    """The body as an instance of `model`.

    Raises:
        ApiError: 413 over `max_body_bytes`, 415 when compressed, 400 for anything else wrong.
    """
    body = await _read_bytes(request, max_body_bytes)
    if len(body) < _LARGE_BODY_BYTES:
        return _parse(body, model)
    return await run_in_threadpool(_parse, body, model)


async def _read_bytes(request: Request, max_body_bytes: int) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding '{encoding}' is not supported; send plain JSON.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise _too_large(max_body_bytes)
    return bytes(body)


def _too_large(max_body_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_body_bytes} bytes.")


def _parse(body: bytes, model: type[Model]) -> Model:
    constants: list[str] = []  # NaN and Infinity, which Python reads and JSON does not know
    value = _parse_object(body, constants)
    if _SURROGATE_ESCAPE.search(body):
        _refuse_surrogates(value)
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None  # names the field, also for a NaN
    if constants:
        raise bad_request(f"The request body is not valid JSON: {constants[0]} is not a number.")
    return parsed


def _refuse_surrogates(body: dict[str, Any]) -> None:
    """Half a surrogate pair has no UTF-8 form: no tokenizer takes it and no answer can hold it."""
    places: list[tuple[tuple[int | str, ...], Any]] = [((), body)]
    while places:
        path, value = places.pop()
        if isinstance(value, dict):
            for key, entry in value.items():
                _check_text(key, path)
                places.append(((*path, key), entry))
        elif isinstance(value, list):
            places.extend(((*path, index), entry) for index, entry in enumerate(value))
        elif isinstance(value, str):
            _check_text(value, path)


def _check_text(text: str, path: tuple[int | str, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        param = param_path(path)
        message = f"Invalid '{param}': the text holds an unpaired surrogate."
        raise bad_request(message, param=param or None) from None


def _parse_object(body: bytes, constants: list[str]) -> dict[str, Any]:
    if not body.strip():
        raise bad_request("The request body is empty; expected a JSON object.")

    def keep_constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        # A byte order mark is not JSON, but some shells and editors write one.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=keep_constant)
    except UnicodeDecodeError:
        raise bad_request("The request body is not valid UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise bad_request(f"The request body is not valid JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except ValueError:  # a number of thousands of digits
        raise bad_request("The request body holds a number that is too long.") from None
    if not isinstance(value, dict):
        kind = json_kind(value)
        raise bad_request(f"The request body must be a JSON object, but it is {kind}.")
    return value
