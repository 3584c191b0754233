"""Two agents of the OpenAI Agents SDK; the second goes on with the first one's conversation."""

from __future__ import annotations

import asyncio
import os
import uuid

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    RunResult,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
set_tracing_disabled(True)  # traces would be sent to OpenAI
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
model = OpenAIChatCompletionsModel("SmolLM2-135M-Instruct", client)
settings = ModelSettings(
    max_tokens=80,
    temperature=0,
    extra_body={"relay_session": f"lamp-{uuid.uuid4().hex[:8]}"},
)


def agent(name: str, instructions: str) -> Agent[None]:
    return Agent(name=name, instructions=instructions, model=model, model_settings=settings)


def show(result: RunResult) -> None:
    """Prints an agent's text, and how much of its prompt was not computed again."""
    usage = result.context_wrapper.usage
    relayed = usage.input_tokens_details.cached_tokens
    print(f"{result.last_agent.name}: {result.final_output}\n")
    print(f"  Relayed: {relayed} tokens of a prompt of {usage.input_tokens}\n")


async def main() -> None:
    """A writer, then a reviewer."""
    writer = agent("Writer", "You write short product texts.")
    reviewer = agent("Reviewer", "You review product texts for a shop, and you are strict.")
    draft = await Runner.run(writer, "Write about a folding desk lamp.")
    show(draft)
    task = {"role": "user", "content": "Say in two sentences what you would change."}
    show(await Runner.run(reviewer, [*draft.to_input_list(), task]))


asyncio.run(main())
