"""Two agents of the Agents SDK as it is by default: over /v1/responses, the second streamed.

The SDK takes a response that was cut by `max_tokens` for a failure, so both must end by themselves.
"""

from __future__ import annotations

import asyncio
import os
import uuid

from agents import (
    Agent,
    ModelSettings,
    Runner,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{os.environ['RELAYKV_URL']}/v1", api_key="none")
set_default_openai_client(client, use_for_tracing=False)
settings = ModelSettings(
    max_tokens=400,
    temperature=0,
    extra_body={"relay_session": f"agents-{uuid.uuid4().hex[:8]}"},
)


def agent(name: str, instructions: str) -> Agent[None]:
    model = "SmolLM2-135M-Instruct"
    return Agent(name=name, instructions=instructions, model=model, model_settings=settings)


async def main() -> None:
    writer = agent("Writer", "You write short product texts.")
    reviewer = agent("Reviewer", "You are strict about vague claims.")
    draft = await Runner.run(writer, "Explain in two short sentences why the sky is blue.")
    task = {"role": "user", "content": "Is that right? Answer in one short sentence."}
    review = Runner.run_streamed(reviewer, [*draft.to_input_list(), task])
    kinds = [event.type async for event in review.stream_events()]
    assert kinds.count("raw_response_event") > 8, kinds
    print(review.final_output)


asyncio.run(main())
