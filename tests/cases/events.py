"""Reads streamed answers as a client would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Stream:
    """A streamed answer, taken apart."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, list[str]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_done: bool = False
    num_comments: int = 0


def read_stream(response: httpx.Response) -> Stream:
    """Every event is a comment, a JSON object or `[DONE]`, and ends with a blank line."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    stream = Stream()
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    for event in events:
        assert not stream.is_done
        assert stream.error is None
        if event.startswith(": "):
            stream.num_comments += 1
        elif event == "data: [DONE]":
            stream.is_done = True
        else:
            _take(stream, json.loads(event.removeprefix("data: ")))
    return stream


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        stream.error = chunk["error"]
        return
    stream.chunks.append(chunk)
    for choice in chunk["choices"]:
        index = choice["index"]
        text = choice["delta"].get("content") or ""
        stream.texts[index] = stream.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            stream.reasons.setdefault(index, []).append(choice["finish_reason"])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that is one, and nothing else."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["code"] is None or isinstance(error["code"], str)
    for internal in ("pydantic", "Traceback", "object at 0x"):
        assert internal not in error["message"]
    return dict(error)
