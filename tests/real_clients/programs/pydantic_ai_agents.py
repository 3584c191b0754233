"""Two pydantic-ai agents: the second goes on with the first one's messages, streamed."""

from __future__ import annotations

import asyncio
import os
import uuid

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

provider = OpenAIProvider(base_url=f"{os.environ['RELAYKV_URL']}/v1", api_key="none")
model = OpenAIChatModel("SmolLM2-135M-Instruct", provider=provider)
settings = ModelSettings(
    max_tokens=70,
    temperature=0,
    extra_headers={"X-Relay-Session": f"pydantic-{uuid.uuid4().hex[:8]}"},
)


async def main() -> None:
    writer = Agent(model, instructions="You write short product texts.", model_settings=settings)
    reviewer = Agent(model, instructions="You are strict.", model_settings=settings)
    draft = await writer.run("Write about a folding desk lamp.")
    history = draft.all_messages()
    async with reviewer.run_stream("Review it.", message_history=history) as review:
        print(await review.get_output())


asyncio.run(main())
