"""Notices that a client has gone, so that nothing is generated for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` and cancels it when the client goes away first.

    The request's body must have been read: `receive` then only ever tells of the disconnect.

    Raises:
        ClientDisconnect: the client went away; `work` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        # Also reached when the server itself cancels this request at shutdown.
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
