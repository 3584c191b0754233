"""Calls an application in this process, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

CHAT = "/v1/chat/completions"


class AppClient:
    """A blocking client: every call runs the application to the end of its answer."""

    def __init__(self, app: FastAPI) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            base_url = "http://test"
            async with httpx.AsyncClient(transport=self._transport, base_url=base_url) as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat completion of one short message unless `fields` say otherwise."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post(CHAT, json=body)
