"""Who asks, and in which session: the sources of a session's name, and the tenant."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any

from fastapi import Request

from relaykv.server.errors import bad_request, json_kind

SESSION_HEADER = "X-Relay-Session"
URL_SESSION_KEY = "relaykv.session"  # set in the ASGI scope by the URL prefix
MAX_SESSION_LENGTH = 256  # characters


def session_of(request: Request, body_session: str | None, metadata: Any) -> str | None:
    """The session's name from the first source that gives one; empty names do not count.

    Raises:
        ApiError: 400 when the name is of a wrong type, too long or holds control characters.
    """
    header = request.headers.get(SESSION_HEADER, "")
    sources = (
        ("relay_session", body_session),
        # Header values arrive as Latin-1; clients mean UTF-8.
        (SESSION_HEADER, header.encode("latin-1").decode("utf-8", "surrogateescape")),
        ("session", request.scope.get(URL_SESSION_KEY)),
        ("metadata.relay_session", _from_metadata(metadata)),
    )
    for param, name in sources:
        if name:
            return checked_session(name, param)
    return None


def checked_session(name: str, param: str) -> str:
    """`name` itself when it may name a session.

    Raises:
        ApiError: 400 naming `param`.
    """
    if len(name) > MAX_SESSION_LENGTH:
        message = f"Invalid '{param}': at most {MAX_SESSION_LENGTH} characters are allowed."
        raise bad_request(message, param=param)
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise bad_request(f"Invalid '{param}': control characters are not allowed.", param=param)
    return name


def tenant_of(request: Request) -> str:
    """A digest of the API key, "" without one: caches of different keys never meet."""
    value = request.headers.get("Authorization", "").strip()
    scheme, _, token = value.partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else value
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""


def _from_metadata(metadata: Any) -> str | None:
    if not isinstance(metadata, dict):
        return None
    name = metadata.get("relay_session")
    if name is None or isinstance(name, str):
        return name
    param = "metadata.relay_session"
    kind = json_kind(name)
    message = f"Invalid type for '{param}': expected a string, but got {kind} instead."
    raise bad_request(message, param=param)
