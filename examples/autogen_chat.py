"""Two AutoGen agents in a round-robin chat. Each reads the other's text as a user message."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import DefaultAsyncHttpxClient

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")


async def show_relay(response: Any) -> None:
    """AutoGen's own figures leave out what was reused; the answer has it."""
    answer = json.loads(await response.aread())
    tokens = answer["relay"]["tokens"]
    print(
        f"  Relayed: {tokens['relayed']} tokens left as they were, {tokens['recomputed']}"
        f" repaired, of a prompt of {answer['usage']['prompt_tokens']}"
    )


async def main() -> None:
    """A writer, then a reviewer."""
    client = OpenAIChatCompletionClient(
        model="SmolLM2-135M-Instruct",
        base_url=f"{URL}/v1",
        api_key="none",
        max_tokens=80,
        temperature=0,
        extra_body={"relay_session": f"lamp-{uuid.uuid4().hex[:8]}"},
        http_client=DefaultAsyncHttpxClient(event_hooks={"response": [show_relay]}),
        model_info={  # AutoGen asks it of every model that it does not know
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )
    writer = AssistantAgent("writer", client, system_message="You write short product texts.")
    role = "You review product texts for a shop, and you are strict."
    reviewer = AssistantAgent("reviewer", client, system_message=role)
    team = RoundRobinGroupChat([writer, reviewer], termination_condition=MaxMessageTermination(3))
    async for event in team.run_stream(task="Write about a folding desk lamp, then review it."):
        if hasattr(event, "content"):
            print(f"{event.source}: {event.content}\n")
    await client.close()


asyncio.run(main())
