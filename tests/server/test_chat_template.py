"""Chat templates of model folders, and prompts that are built with them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ByteTokenizer

from relaykv.server.chat_template import HuggingFaceTemplate, template_message
from relaykv.server.errors import ApiError
from relaykv.server.prompt import PromptBuilder
from relaykv.server.protocol import ChatMessage

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{{ bos_token }}{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"


def message(**fields: Any) -> ChatMessage:
    return ChatMessage.model_validate(fields)


def write_folder(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    added = [
        {"id": 1, "content": "<|im_start|>", "special": True},
        {"id": 2, "content": "<think>", "special": False},
    ]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_the_template_file_is_rendered_with_a_generation_prompt(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    template = HuggingFaceTemplate.from_folder(tmp_path)
    text = template.render([{"role": "user", "content": "  hi {{ x }} "}])
    assert text == "<|im_start|>user\n  hi {{ x }} <|im_end|>\n<|im_start|>assistant\n"
    assert template.special_tokens == ("<|im_start|>",)


def test_the_template_may_stand_in_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    for source in (CHATML, named):
        template = HuggingFaceTemplate.from_folder(write_folder(tmp_path, chat_template=source))
        assert "assistant" in template.render([])


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        HuggingFaceTemplate.from_folder(write_folder(tmp_path))


def test_a_developer_is_a_system_for_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system\nx" in HuggingFaceTemplate(CHATML).render(messages)
    knows = HuggingFaceTemplate("{# developer #}" + CHATML)
    assert "<|im_start|>developer\nx" in knows.render(messages)


def test_a_template_that_raises_gives_its_reason(tmp_path: Path) -> None:
    bos = {"content": "<s>", "special": True}
    folder = write_folder(tmp_path, chat_template=STRICT, bos_token=bos)
    template = HuggingFaceTemplate.from_folder(folder)
    assert template.render([{"role": "user", "content": "x"}]) == "<s>"
    prompts = PromptBuilder(template, ByteTokenizer())
    messages = [message(role="user", content="x")] * 2
    with pytest.raises(ApiError, match="one only") as refused:
        asyncio.run(prompts.from_messages(messages))
    assert refused.value.status == 400
    prompts.close()


def test_tool_arguments_are_objects_and_nulls_are_gone() -> None:
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    call = {"id": "c", "type": "function", "function": function}
    values = template_message(message(role="assistant", content=None, tool_calls=[call]))
    assert values["content"] == ""
    assert values["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    broken = {**call, "function": {"name": "f", "arguments": "{oops"}}
    values = template_message(message(role="assistant", tool_calls=[broken]))
    assert values["tool_calls"][0]["function"]["arguments"] == "{oops"
    plain = {"role": "assistant", "content": "x"}
    assert template_message(message(**plain, tool_calls=[], name=None)) == plain
    assert template_message(message(role="function", content="x", name="f"))["role"] == "tool"


def test_control_tokens_in_a_message_stay_text() -> None:
    class Spy(ByteTokenizer):
        pieces: tuple[str, ...] = ()

        def encode(self, text: str) -> list[int]:
            self.pieces += (text,)
            return super().encode(text)

    template = HuggingFaceTemplate(CHATML, ("<|im_start|>", "<|im_end|>", "<|", "|"))
    spy = Spy()
    prompts = PromptBuilder(template, spy)
    asyncio.run(prompts.from_messages([message(role="user", content="a<|im_end|>b")]))
    assert "".join(spy.pieces).startswith("<|im_start|>user\na<|im_end|>b<|im_end|>\n")
    assert not any("a<|" in piece for piece in spy.pieces)
    before = len(spy.pieces)
    asyncio.run(prompts.from_messages([message(role="user", content="nothing to cut")]))
    assert len(spy.pieces) == before + 1
    prompts.close()
