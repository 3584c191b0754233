"""Tells kinds of agents apart by what a client sends in front of a conversation."""

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
