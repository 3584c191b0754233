"""Two agents with nothing but an HTTP library. The session stands in the body."""

from __future__ import annotations

import os
import uuid
from typing import Any

import httpx

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
SESSION = f"lamp-{uuid.uuid4().hex[:8]}"


def ask(http: httpx.Client, system: str, user: str) -> dict[str, Any]:
    """One agent's answer."""
    body = {
        "relay_session": SESSION,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_tokens": 80,
        "temperature": 0,
    }
    response = http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def main() -> None:
    """A writer, then a reviewer who reads what the writer wrote."""
    with httpx.Client(base_url=URL, timeout=600) as http:
        draft = ask(http, "You write short product texts.", "Write about a folding desk lamp.")
        text = draft["choices"][0]["message"]["content"]
        print(f"Writer: {text}\n")
        task = f"A colleague wrote this:\n\n{text}\n\nSay in two sentences what you would change."
        review = ask(http, "You review product texts for a shop, and you are strict.", task)
        print(f"Reviewer: {review['choices'][0]['message']['content']}\n")
        tokens = review["relay"]["tokens"]
        print(
            f"Relayed: {tokens['relayed']} tokens left as they were, {tokens['recomputed']}"
            f" repaired, of a prompt of {review['usage']['prompt_tokens']}"
        )
        http.delete(f"/v1/relay/sessions/{SESSION}").raise_for_status()


if __name__ == "__main__":
    main()
