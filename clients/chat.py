"""A terminal chat that shows after every turn where its prompt came from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from secrets import token_hex

import openai
from openai.types.chat import ChatCompletionMessageParam as Message

from relaykv.clients.openai_client import open_session, relay_of
from relaykv.clients.streamed_answer import PromptTokens, prompt_tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Reads turns until the input ends; exits with a message when the server refuses."""
    parser = argparse.ArgumentParser(prog="python -m relaykv.clients.chat", description=__doc__)
    parser.add_argument("--url", help="the server, if not RELAYKV_URL or 127.0.0.1:8000")
    parser.add_argument("--session", default=f"chat-{token_hex(4)}")
    parser.add_argument("--role", default="You are a helpful assistant.", help="system prompt")
    options = parser.parse_args(argv)
    messages: list[Message] = [{"role": "system", "content": options.role}]
    try:
        client = open_session(options.session, options.url)
        model = client.models.list().data[0].id
        print(f"{model}, session {options.session}. /role TEXT lets another agent go on.")
        while (line := input("> ").strip()) != "/quit":
            if line.startswith("/role "):
                messages[0] = {"role": "system", "content": line.removeprefix("/role ")}
            elif line:
                messages.append({"role": "user", "content": line})
                text, prompt = _answer(client, model, messages)
                messages.append({"role": "assistant", "content": text})
                print(f"\n  [{prompt}]")
    except openai.OpenAIError as error:
        sys.exit(f"chat: {error}")
    except (EOFError, KeyboardInterrupt):
        print()


def _answer(client: openai.OpenAI, model: str, messages: list[Message]) -> tuple[str, PromptTokens]:
    """Prints the answer while it comes; returns it, and the prompt's tokens by kind."""
    text, prompt = "", PromptTokens(0, 0, 0, 0, 0)
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=500, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        text += (piece := "".join(choice.delta.content or "" for choice in chunk.choices))
        print(piece, end="", flush=True)
        prompt = prompt_tokens(chunk.usage, relay_of(chunk)) if chunk.usage else prompt
    return text, prompt


if __name__ == "__main__":
    main()
