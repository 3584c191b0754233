"""A LangChain chat model whose requests all belong to one relay session."""

from __future__ import annotations

from typing import Any

from relaykv.clients.session_url import session_url


def chat_model(
    session: str,
    model: str,
    url: str | None = None,
    *,
    api_key: str = "none",
    **options: Any,
) -> Any:
    """A `ChatOpenAI` bound to `session`; needs the package langchain-openai.

    The session stands in the base URL and not in `extra_body`, so that binding the model
    again, as agents do, cannot lose it. `options` go to `ChatOpenAI`.

    Raises:
        ImportError: langchain-openai is not installed.
    """
    from langchain_openai import ChatOpenAI

    base_url = session_url(session, url)
    return ChatOpenAI(model=model, base_url=base_url, api_key=api_key, **options)


def num_cached(message: Any) -> int:
    """Prompt tokens of an `AIMessage` that were not computed again."""
    details = (message.usage_metadata or {}).get("input_token_details", {})
    return int(details.get("cache_read", 0))
