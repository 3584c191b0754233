"""What clients may send: the wire types, validated strictly, with unknown fields ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from relaykv.server.errors import bad_request, json_kind
from relaykv.server.field_schemas import (
    bias_schema,
    content_schema,
    response_format_schema,
    stop_schema,
    tool_choice_schema,
)

MAX_STOP_STRINGS = 4
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
_INT64 = 2**63

_TEXT_PART_FIELDS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def invalid_value(message: str) -> PydanticCustomError:
    """What a validator raises; the message is told to the client behind the field's name."""
    return PydanticCustomError("relaykv", "{message}", {"message": message})


def _content_text(value: object) -> str:
    """Joins a message's content to one string: parts are put together without a separator."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part_text(index, part) for index, part in enumerate(value))
    kind = json_kind(value)
    raise invalid_value(f"expected a string or an array of text parts, but got {kind} instead.")


def _part_text(index: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid_value(f"part {index} must be an object with a 'type'.")
    field = _TEXT_PART_FIELDS.get(part["type"])
    if field is None:
        kind = part["type"]
        raise invalid_value(f"part {index} has type '{kind}'; this model reads text parts only.")
    text = part.get(field)
    if not isinstance(text, str):
        raise invalid_value(f"part {index} must hold a string in '{field}'.")
    return text


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        kind = json_kind(value)
        raise invalid_value(f"expected a string or an array of strings, but got {kind} instead.")
    if len(entries) > MAX_STOP_STRINGS:
        raise invalid_value(f"at most {MAX_STOP_STRINGS} stop strings are allowed.")
    if not all(isinstance(entry, str) for entry in entries):
        raise invalid_value("every stop sequence must be a string.")
    if "" in entries:
        raise invalid_value("a stop string must not be empty.")
    return tuple(entries)


def _bias_by_id(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_value(f"expected an object, but got {json_kind(value)} instead.")
    bias: dict[int, float] = {}
    for key, addend in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise invalid_value("every key must be a token id of the model's vocabulary.")
        number = isinstance(addend, int | float) and not isinstance(addend, bool)
        if not number or not -100 <= addend <= 100:  # NaN fails the comparison
            raise invalid_value(f"the bias of token {key} must be a number from -100 to 100.")
        bias[int(key)] = float(addend)
    return bias


class WireModel(BaseModel):
    """Strict types ("0.5" is no number, true is no integer) and unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class CalledFunction(WireModel):
    """The function of a call; its arguments are JSON text, or an object from some clients."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(WireModel):
    """A call in an assistant's message."""

    id: str | None = None
    function: CalledFunction


class ChatMessage(WireModel):
    """One message. Its content is text by now, "" when it was null or absent."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_content_text), WithJsonSchema(content_schema())] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None  # the older form of tool_calls


class FunctionDefinition(WireModel):
    """A function; without parameters it takes none."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None


class FunctionTool(WireModel):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(WireModel):
    """`include_usage` asks for one more chunk with the token counts."""

    include_usage: bool | None = None


class RelayBody(WireModel):
    """The `relay` object of a request; null means the default everywhere."""

    policy: str | None = None
    store: bool | None = None
    explain: bool | None = None


def _never(_value: object) -> bool:
    return False


def _is_empty(value: object) -> bool:
    return value == [] or value == {}


# Fields that are known and would change the answer, each with the values that would not.
_UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "functions": _is_empty,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value in (["text"], []),
    "audio": _never,
    "web_search_options": _never,
    "continue_final_message": lambda value: value is False,
    "add_generation_prompt": lambda value: value is True,
    "min_tokens": lambda value: value == 0,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "structured_outputs": _never,
    "chat_template": _never,
}


class GenerationRequest(WireModel):
    """What the bodies of all generation endpoints have in common."""

    unsupported: ClassVar[Mapping[str, Callable[[object], bool]]] = {}

    model: str | None = None  # null: the model that is served
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 are off
    min_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None  # ignored without stream
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(_stop_strings),
        WithJsonSchema(stop_schema(MAX_STOP_STRINGS)),
    ] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    logit_bias: Annotated[
        dict[int, float], BeforeValidator(_bias_by_id), WithJsonSchema(bias_schema())
    ] = Field(default_factory=dict)
    ignore_eos: bool | None = None
    relay_session: str | None = None
    relay: RelayBody | None = None
    metadata: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_change_the_answer(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, is_harmless in cls.unsupported.items():
                if body.get(name) is not None and not is_harmless(body[name]):
                    message = f"'{name}' with this value is not supported by this server yet."
                    raise bad_request(message, param=name, code="unsupported_parameter")
        return body

    @property
    def num_choices(self) -> int:
        """Answers to every prompt."""
        return 1

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for beside the chosen token; None when no log-probabilities are."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likewise for the tokens of the prompt."""
        return None

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's limit as asked for, before it is cut to the room in the context."""
        return None


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, Callable[[object], bool]]] = _UNSUPPORTED

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # wins over max_tokens
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, WithJsonSchema(tool_choice_schema())] = None
    parallel_tool_calls: bool | None = None  # null: true
    response_format: Annotated[Any, WithJsonSchema(response_format_schema())] = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(WireModel):
    """Body of POST /tokenize: plain text, or messages that go through the chat template."""

    text: str | None = None
    prompt: str | None = None  # another name for text
    messages: list[ChatMessage] | None = Field(None, min_length=1)


class DetokenizeRequest(WireModel):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]
