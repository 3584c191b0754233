"""What clients may send to /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from relaykv.server.errors import ApiError, bad_request, from_validation, json_kind
from relaykv.server.protocol import (
    MAX_TOP_LOGPROBS,
    ChatCompletionRequest,
    ChatMessage,
    GenerationRequest,
    StreamOptions,
    WireModel,
    invalid_value,
)

LOGPROBS_INCLUDE = "message.output_text.logprobs"

# What a field of a chat body is called here, longest first.
_OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
    (".function", ""),
)


def _input(value: object) -> str | list[Any]:
    if isinstance(value, str | list):
        return value
    kind = json_kind(value)
    raise invalid_value(f"expected a string or an array of items, but got {kind} instead.")


def _is_false(value: object) -> bool:
    return value is False


def _never(_value: object) -> bool:
    return False


class TextFormat(WireModel):
    """`text.format`: the form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    def told_back(self) -> dict[str, Any]:
        """The format as the response shows it."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def chat_format(self) -> dict[str, Any]:
        """The same as `response_format` of a chat body."""
        if self.type != "json_schema":
            return {"type": self.type}
        fields = self.model_dump(by_alias=True, exclude_unset=True, exclude={"type"})
        return {"type": self.type, "json_schema": fields}


class TextOptions(WireModel):
    """The `text` object."""

    format: TextFormat | None = None


class FunctionTool(WireModel):
    """A function the model may call."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted_tools(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = f"Tools of type '{kind}' are not supported; this server has functions only."
            raise bad_request(message, param="tools", code="unsupported_parameter")
        return tool

    def told_back(self) -> dict[str, Any]:
        """The tool as the response shows it."""
        return self.model_dump()

    def chat_tool(self) -> dict[str, Any]:
        """The same as an entry of `tools` of a chat body."""
        fields = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": fields}


class ResponseRequest(GenerationRequest):
    """Body of POST /v1/responses."""

    unsupported: ClassVar[Mapping[str, Callable[[object], bool]]] = {
        "background": _is_false,
        "conversation": _never,
        "prompt": _never,
    }

    input: Annotated[str | list[Any], BeforeValidator(_input)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # null: true
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        choice = self.tool_choice
        named = isinstance(choice, dict) and choice.get("type") == "function"
        if choice is not None and not named and choice not in ("auto", "none", "required"):
            message = "'tool_choice' must be 'auto', 'none', 'required' or a function."
            raise bad_request(message, param="tool_choice", code="unsupported_parameter")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS_INCLUDE in (self.include or ())

    def chat_request(self, messages: list[ChatMessage]) -> ChatCompletionRequest:
        """The same wishes as a chat body; `messages` stand for input and instructions.

        Raises:
            ApiError: 400 naming a field of this body.
        """
        fields: dict[str, Any] = {
            "messages": [{"role": "user"}],  # replaced: ours are validated
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": self._chat_tool_choice(),
        }
        if self.tools:
            fields["tools"] = [tool.chat_tool() for tool in self.tools]
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.chat_format()
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        chat = _validated(fields)
        common = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        usage = StreamOptions(include_usage=True)
        return chat.model_copy(update={**common, "messages": messages, "stream_options": usage})

    def _chat_tool_choice(self) -> Any:
        if isinstance(self.tool_choice, dict):
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        return self.tool_choice


def renamed(error: ApiError) -> ApiError:
    """An error about a chat body as one about the body it was made from."""
    param = error.param
    for theirs, ours in _OWN_NAMES:
        if param is not None:
            param = param.replace(theirs, ours)
    message = error.message
    if error.param is not None and param is not None:
        message = message.replace(f"'{error.param}'", f"'{param}'")
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def _validated(fields: dict[str, Any]) -> ChatCompletionRequest:
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise renamed(from_validation(error)) from None
    except ApiError as error:
        raise renamed(error) from None
