"""What a conversation tells of the agent that leads it, as digests that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from relaykv.server.protocol import ChatMessage

_INSTRUCTIONS = ("system", "developer")


def agent_class(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
    """A digest of the leading system messages and the tools; "" when there are neither.

    Agents of one role send the same ones in every run, whatever their task.
    """
    leading = takewhile(lambda message: message.role in _INSTRUCTIONS, messages)
    instructions = [message.content for message in leading]
    if not instructions and not tools:
        return ""
    parts = json.dumps([instructions, list(tools)], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def question(messages: Sequence[ChatMessage]) -> str:
    """A digest of the user message that ends a conversation; "" when another message does.

    Agents that are to answer one question, so that another may choose, are sent the same one.
    Behind a tool's result an agent goes on with its work: its steps are no answers to choose from.
    """
    if not messages or messages[-1].role != "user":
        return ""
    return hashlib.sha256(messages[-1].content.encode()).hexdigest()
