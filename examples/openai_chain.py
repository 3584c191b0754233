"""Three agents in a chain with the `openai` package. The session is a field of the body."""

from __future__ import annotations

import os
import uuid

from openai import OpenAI

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
SESSION = f"lamp-{uuid.uuid4().hex[:8]}"
client = OpenAI(base_url=f"{URL}/v1", api_key="none")


def ask(name: str, system: str, user: str) -> str:
    """One agent's text; prints it, and what was relayed into its prompt."""
    answer = client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        max_tokens=80,
        temperature=0,
        extra_body={"relay_session": SESSION},  # OpenAI(...) and create(...) refuse it by itself
    )
    text = answer.choices[0].message.content or ""
    tokens = answer.model_extra["relay"]["tokens"]
    print(f"{name}: {text}\n")
    print(
        f"  Relayed: {tokens['relayed']} tokens left as they were, {tokens['recomputed']}"
        f" repaired, of a prompt of {answer.usage.prompt_tokens}\n"
    )
    return text


def main() -> None:
    """The editor reads both earlier texts, in the other order."""
    draft = ask("Writer", "You write short product texts.", "Write about a folding desk lamp.")
    review = ask(
        "Reviewer",
        "You review product texts for a shop, and you are strict.",
        f"A colleague wrote this:\n\n{draft}\n\nSay in two sentences what you would change.",
    )
    ask(
        "Editor",
        "You are the editor of a shop's catalogue. You have the last word.",
        f"The review:\n\n{review}\n\nThe text:\n\n{draft}\n\nWrite the final text.",
    )


if __name__ == "__main__":
    main()
