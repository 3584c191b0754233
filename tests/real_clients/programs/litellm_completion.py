"""Two agents through LiteLLM, which sends an unknown keyword as a field of the body."""

from __future__ import annotations

import os
import uuid

import litellm

URL = os.environ["RELAYKV_URL"]
SESSION = f"litellm-{uuid.uuid4().hex[:8]}"


def ask(system: str, user: str) -> str:
    answer = litellm.completion(
        model="openai/SmolLM2-135M-Instruct",
        api_base=f"{URL}/v1",
        api_key="none",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        max_tokens=70,
        temperature=0,
        relay_session=SESSION,
    )
    return str(answer.choices[0].message.content)


draft = ask("You write short product texts.", "Write about a folding desk lamp.")
print(ask("You review product texts for a shop.", f"A colleague wrote:\n\n{draft}\n\nReview it."))
