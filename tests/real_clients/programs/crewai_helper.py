"""Two calls of the CrewAI LLM that relaykv.clients makes."""

from __future__ import annotations

import uuid

from relaykv.clients.crewai_client import crew_llm

session = f"crewai-{uuid.uuid4().hex[:8]}"
llm = crew_llm(session, "SmolLM2-135M-Instruct", max_tokens=70, temperature=0)
draft = llm.call(
    [
        {"role": "system", "content": "You write product texts."},
        {"role": "user", "content": "Describe a desk lamp."},
    ]
)
task = f"A colleague wrote:\n\n{draft}\n\nReview it."
system = {"role": "system", "content": "You review product texts for a shop."}
print(llm.call([system, {"role": "user", "content": task}]))
