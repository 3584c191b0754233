"""A LangGraph of three nodes that put each other's texts into their own prompts."""

from __future__ import annotations

import os
import uuid
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
llm = ChatOpenAI(
    model="SmolLM2-135M-Instruct",
    base_url=f"{URL}/v1",
    api_key="none",
    max_tokens=80,
    temperature=0,
    # In the constructor: an agent that binds the model again would lose a bound extra_body.
    extra_body={"relay_session": f"lamp-{uuid.uuid4().hex[:8]}"},
)


class State(TypedDict, total=False):
    """What the nodes hand on."""

    draft: str
    review: str
    final: str


def ask(name: str, system: str, user: str) -> str:
    """One agent's text; prints it, and how much of its prompt was not computed again."""
    answer = llm.invoke([("system", system), ("human", user)])
    usage = answer.usage_metadata
    relayed = usage["input_token_details"].get("cache_read", 0)
    print(f"{name}: {answer.content}\n")
    print(f"  Relayed: {relayed} tokens of a prompt of {usage['input_tokens']}\n")
    return str(answer.content)


def write(_: State) -> State:
    return {"draft": ask("Writer", "You write product texts.", "Write about a folding lamp.")}


def review(state: State) -> State:
    task = f"Review this draft:\n\n{state['draft']}\n\nGive feedback in two sentences."
    return {"review": ask("Reviewer", "You review product texts for a shop.", task)}


def edit(state: State) -> State:
    task = f"Feedback:\n\n{state['review']}\n\nDraft:\n\n{state['draft']}\n\nImprove the draft."
    return {"final": ask("Editor", "You are the editor of a shop's catalogue.", task)}


graph = StateGraph(State).add_sequence([write, review, edit])
graph.add_edge(START, "write").add_edge("edit", END).compile().invoke({})
