"""Configuration of the HTTP side: given by the command line, never found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and habits of the server."""

    version: str = "0"  # of the package; part of system_fingerprint
    default_policy: str = "auto"  # what GET /v1/relay tells; the engine applies its own
    keepalive_s: float = 10.0  # silence after which a stream gets a comment line
    max_body_bytes: int = 64 * 1024 * 1024  # larger bodies are refused with 413
    num_prompt_threads: int = 2  # render and tokenise beside the event loop
    max_stored_responses: int = 4096  # of /v1/responses, over all API keys
    max_stored_response_bytes: int = 64 * 1024 * 1024
    response_ttl_s: float = 3600.0  # how long such a response is kept
    retry_after_s: int = 5  # told to clients while the model loads
