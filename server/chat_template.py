"""Messages to text: the model's own chat template, rendered by transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relaykv.server.protocol import CalledFunction, ChatMessage, MessageToolCall
from relaykv.server.tool_form import ToolForm, tool_form_of

_Renderer = Callable[[str, list[dict[str, Any]], Sequence[dict[str, Any]], Mapping[str, str]], str]
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate(Protocol):
    """Renders a conversation."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that the tokenizer reads as control tokens."""
        ...

    @property
    def tool_form(self) -> ToolForm:
        """How it teaches its model to call tools."""
        ...

    def render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The prompt's text, ending where the assistant's next turn starts.

        Tools, and messages that call them or tell their results, only come here when the
        template has a form for them.

        Raises:
            Exception: whatever the template raises; its text tells the reason.
        """
        ...


class HuggingFaceTemplate:
    """The template of a Hugging Face model folder."""

    def __init__(
        self,
        source: str,
        special_tokens: tuple[str, ...] = (),
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Takes the Jinja source, the control tokens and those a template may name."""
        self._source = source
        self._special_tokens = special_tokens
        self._named_tokens = dict(named_tokens or {})
        self._tool_form = tool_form_of(source)
        self._render = _library_renderer()

    @classmethod
    def from_folder(cls, folder: Path) -> HuggingFaceTemplate:
        """Reads a model folder.

        Raises:
            ValueError: the folder has no chat template.
        """
        config = _read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        if source is None:
            message = f"the model in {folder} has no chat template (it is not a chat model)"
            raise ValueError(message)
        added = _read_json(folder / "tokenizer.json").get("added_tokens") or []
        special_tokens = tuple(entry["content"] for entry in added if entry.get("special"))
        named = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKEN_NAMES}
        named_tokens = {name: text for name, text in named.items() if text is not None}
        return cls(source, special_tokens or tuple(named_tokens.values()), named_tokens)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self._special_tokens

    @property
    def tool_form(self) -> ToolForm:
        return self._tool_form

    def render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        if "developer" not in self._source:
            messages = [_without_developer(message) for message in messages]
        return self._render(self._source, messages, tools, self._named_tokens)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: no nulls, and tool arguments as objects."""
    role = "tool" if message.role == "function" else message.role
    values: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None:
        values["name"] = message.name
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        values["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    elif message.function_call is not None:
        function = _template_function(message.function_call)
        values["tool_calls"] = [{"type": "function", "function": function}]
    return values


def _template_call(call: MessageToolCall) -> dict[str, Any]:
    values: dict[str, Any] = {"type": "function", "function": _template_function(call.function)}
    if call.id is not None:
        values["id"] = call.id
    return values


def _template_function(function: CalledFunction) -> dict[str, Any]:
    arguments: Any = function.arguments
    if isinstance(arguments, str):
        # What a model wrote need not be JSON; the text is shown as it is then.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {"name": function.name, "arguments": {} if arguments is None else arguments}


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _library_renderer() -> _Renderer:
    # Imported here because it takes a second and only a server with a real model needs it.
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(
        source: str,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        named: Mapping[str, str],
    ) -> str:
        texts, _ = render_jinja_template(
            [messages],
            tools=list(tools) or None,
            chat_template=source,
            add_generation_prompt=True,
            **named,
        )
        return str(texts[0])

    return render


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
