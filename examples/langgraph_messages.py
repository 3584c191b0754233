"""A LangGraph of three nodes that share one list of messages, each behind its own role."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

from langchain_core.messages import SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

URL = os.environ.get("RELAYKV_URL", "http://127.0.0.1:8000")
ROLES = {
    "writer": "You write short product texts.",
    "reviewer": "You review product texts for a shop: say what you would change.",
    "editor": "You are the editor of a shop's catalogue: write the final text.",
}
llm = ChatOpenAI(
    model="SmolLM2-135M-Instruct",
    base_url=f"{URL}/v1",
    api_key="none",
    max_tokens=80,
    temperature=0,
    # In the constructor: an agent that binds the model again would lose a bound extra_body.
    extra_body={"relay_session": f"lamp-{uuid.uuid4().hex[:8]}"},
)


def agent(name: str) -> Callable[[MessagesState], MessagesState]:
    """A node that answers the conversation so far in its role.

    The role stands in front, so the prompt differs from its first token on: nothing of
    it is an exact prefix of an earlier one, and only relaying can reuse it.
    """

    def node(state: MessagesState) -> MessagesState:
        answer = llm.invoke([SystemMessage(ROLES[name]), *state["messages"]])
        usage = answer.usage_metadata
        relayed = usage["input_token_details"].get("cache_read", 0)
        print(f"{name}: {answer.content}\n")
        print(f"  Relayed: {relayed} tokens of a prompt of {usage['input_tokens']}\n")
        answer.name = name
        return {"messages": [answer]}

    return node


graph = StateGraph(MessagesState).add_sequence([(name, agent(name)) for name in ROLES])
graph.add_edge(START, "writer").add_edge("editor", END)
graph.compile().invoke({"messages": [("human", "Describe a folding desk lamp for the shop.")]})
