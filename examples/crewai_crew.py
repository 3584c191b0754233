"""A sequential CrewAI crew. CrewAI pastes a task's result into the next agent's prompt."""

from __future__ import annotations

import os
import uuid

# Read when crewai is imported: no telemetry, and no question about traces at the end.
os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM, Agent, Crew, Process, Task

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
llm = LLM(
    model="openai/SmolLM2-135M-Instruct",  # CrewAI keeps what stands before the slash to itself
    base_url=f"{URL}/v1",
    api_key="none",
    max_tokens=80,
    temperature=0,
    extra_body={"relay_session": f"lamp-{uuid.uuid4().hex[:8]}"},
)


def agent(role: str, goal: str, backstory: str) -> Agent:
    return Agent(role=role, goal=goal, backstory=backstory, llm=llm, max_iter=1, verbose=False)


writer = agent("Writer", "Write short product texts", "You know the shop's goods well.")
reviewer = agent("Reviewer", "Find what a text lacks", "You are strict about vague claims.")
draft = Task(
    description="Write a paragraph about a folding desk lamp.",
    expected_output="One paragraph.",
    agent=writer,
)
review = Task(
    description="Review the paragraph about the lamp.",
    expected_output="Two sentences.",
    agent=reviewer,
    context=[draft],
)
crew = Crew(agents=[writer, reviewer], tasks=[draft, review], process=Process.sequential)
result = crew.kickoff()
print(f"Writer: {draft.output.raw}\n\nReviewer: {result.raw}\n")
usage = result.token_usage
print(f"Relayed: {usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens of the crew")
