from __future__ import annotations

from typing import Any

from relaykv.server.agent import agent_class, question
from relaykv.server.protocol import ChatMessage


def _messages(*pairs: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": role, "content": text}) for role, text in pairs]


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_one_role_is_one_class_whatever_it_is_asked() -> None:
    first = _messages(("system", "You review."), ("user", "Read this."), ("system", "Be brief."))
    second = _messages(("system", "You review."), ("user", "And this."), ("assistant", "Fine."))
    assert agent_class(first, []) == agent_class(second, []) != ""


def test_other_instructions_or_other_tools_are_other_classes() -> None:
    asked = ("user", "Read this.")
    classes = {
        agent_class(_messages(("system", "You review."), asked), []),
        agent_class(_messages(("system", "You write."), asked), []),
        agent_class(_messages(("system", "You review."), ("developer", "Now."), asked), []),
        agent_class(_messages(("system", "You review."), asked), [_tool("search")]),
        agent_class(_messages(("system", "You review."), asked), [_tool("fetch")]),
        agent_class(_messages(asked), [_tool("fetch")]),
    }
    assert len(classes) == 6


def test_the_order_of_a_tools_fields_says_nothing() -> None:
    tool = _tool("search")
    turned = {"function": dict(reversed(tool["function"].items())), "type": "function"}
    asked = _messages(("user", "Read this."))
    assert agent_class(asked, [tool]) == agent_class(asked, [turned])


def test_with_neither_the_engine_is_left_to_tell() -> None:
    assert agent_class(_messages(("user", "Read this."), ("system", "Late.")), []) == ""


def test_one_question_is_one_digest_whoever_is_asked() -> None:
    first = _messages(("system", "You are calm."), ("user", "Why?"))
    second = _messages(("user", "Hello."), ("assistant", "Hello."), ("user", "Why?"))
    assert question(first) == question(second) != ""
    assert question(_messages(("user", "Why not?"))) != question(first)
    assert question(_messages(("system", "Why?"))) == question([]) == ""


def test_steps_of_one_agent_that_calls_tools_are_no_answers_to_one_question() -> None:
    asked = _messages(("user", "Why?"))
    called = _messages(("user", "Why?"), ("assistant", "I look it up."), ("tool", "Because."))
    assert question(asked) != ""
    assert question(called) == ""
    assert question(_messages(("user", "Why?"), ("assistant", "Well,"))) == ""
