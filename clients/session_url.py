"""The base URL that binds a client to a session: no client needs any other setting."""

from __future__ import annotations

import os
from urllib.parse import quote

DEFAULT_URL = "http://127.0.0.1:8000"


def server_url(url: str | None = None) -> str:
    """`url`, else the environment's RELAYKV_URL, else that of `relaykv serve`; without /v1."""
    root = url or os.environ.get("RELAYKV_URL") or DEFAULT_URL
    return root.rstrip("/").removesuffix("/v1").rstrip("/")


def session_url(session: str, url: str | None = None) -> str:
    """A base URL whose requests belong to `session`, whatever characters its name has.

    Raises:
        ValueError: the session has no name.
    """
    if not session:
        raise ValueError("a session needs a name")
    return f"{server_url(url)}/s/{quote(session, safe='')}/v1"
