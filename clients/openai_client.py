"""An `openai` client whose requests all belong to one relay session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

from relaykv.clients.session_url import session_url


def open_session(
    session: str, url: str | None = None, *, api_key: str = "none", **options: Any
) -> openai.OpenAI:
    """A client bound to `session` on the server at `url` (see `server_url`).

    The session belongs to the API key: programs that share one use the same key. `options`
    go to `openai.OpenAI`.
    """
    return openai.OpenAI(base_url=session_url(session, url), api_key=api_key, **options)


def open_async_session(
    session: str, url: str | None = None, *, api_key: str = "none", **options: Any
) -> openai.AsyncOpenAI:
    """The same for asyncio."""
    return openai.AsyncOpenAI(base_url=session_url(session, url), api_key=api_key, **options)


def relay_of(answer: Any) -> Mapping[str, Any] | None:
    """The `relay` object of an answer or of a stream's last chunk; None where there is none."""
    relay = (answer.model_extra or {}).get("relay")
    return relay if isinstance(relay, Mapping) else None


def num_taken_over(answer: Any) -> int:
    """Prompt tokens that came from the session's recordings, repaired ones included."""
    relay = relay_of(answer)
    return 0 if relay is None else int(relay["tokens"]["relayed"] + relay["tokens"]["recomputed"])
