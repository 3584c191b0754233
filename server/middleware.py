"""Plain ASGI middleware: the session in the URL, trailing slashes, and request ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relaykv.server.session import URL_SESSION_KEY

_REQUEST_ID_HEADER = "X-Request-Id"
_SESSION_PATH = re.compile(r"/s/([^/]+)(/v1(?:/.*)?)")
_SANE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class UrlMiddleware:
    """Takes `/s/{session}` off the path's front and slashes off its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _rewritten(scope)
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Answers with the client's X-Request-Id, or with one of its own."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str] | None = None) -> None:
        self._app = app
        self._new_id = new_id or (lambda: f"req_{secrets.token_hex(12)}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(_REQUEST_ID_HEADER, "")
        request_id = sent if _SANE_REQUEST_ID.fullmatch(sent) else self._new_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _rewritten(scope: Scope) -> Scope:
    # The raw path keeps a session's %2F apart from a slash of the URL.
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.decode("latin-1")
    session: str | None = None
    if match := _SESSION_PATH.fullmatch(path):
        session, path = unquote(match[1], errors="surrogateescape"), match[2]
    path = path.rstrip("/") or "/"
    changed = {**scope, "raw_path": path.encode("latin-1"), "path": unquote(path)}
    if session is not None:
        changed[URL_SESSION_KEY] = session
    return changed
