"""A CrewAI language model whose requests all belong to one relay session."""

from __future__ import annotations

from typing import Any

from relaykv.clients.session_url import session_url


def crew_llm(
    session: str,
    model: str,
    url: str | None = None,
    *,
    api_key: str = "none",
    **options: Any,
) -> Any:
    """A `crewai.LLM` bound to `session`; needs the package crewai.

    `options` go to `crewai.LLM`.

    Raises:
        ImportError: crewai is not installed.
    """
    from crewai import LLM

    base_url = session_url(session, url)
    # CrewAI chooses its client by what stands before the slash, and sends the rest.
    return LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key, **options)
