"""What clients may send: the wire types, validated strictly, with unknown fields ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from relaykv.server.errors import bad_request, json_kind

MAX_STOP_STRINGS = 4
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63

_TEXT_PART_FIELDS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("relaykv", "{message}", {"message": message})


def _content_text(value: object) -> str:
    """Joins a message's content to one string: parts are put together without a separator."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, list):
        return _utf8("".join(_part_text(index, part) for index, part in enumerate(value)))
    kind = json_kind(value)
    raise _invalid(f"expected a string or an array of text parts, but got {kind} instead.")


def _part_text(index: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise _invalid(f"part {index} must be an object with a 'type'.")
    field = _TEXT_PART_FIELDS.get(part["type"])
    if field is None:
        kind = part["type"]
        raise _invalid(f"part {index} has type '{kind}'; this model reads text parts only.")
    text = part.get(field)
    if not isinstance(text, str):
        raise _invalid(f"part {index} must hold a string in '{field}'.")
    return text


def _utf8(text: str) -> str:
    # JSON escapes can spell half a surrogate pair, which no tokenizer accepts.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _invalid("the text holds an unpaired surrogate.") from None
    return text


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        kind = json_kind(value)
        raise _invalid(f"expected a string or an array of strings, but got {kind} instead.")
    if len(entries) > MAX_STOP_STRINGS:
        raise _invalid(f"at most {MAX_STOP_STRINGS} stop strings are allowed.")
    if not all(isinstance(entry, str) for entry in entries):
        raise _invalid("every stop sequence must be a string.")
    if "" in entries:
        raise _invalid("a stop string must not be empty.")
    return tuple(_utf8(entry) for entry in entries)


def _bias_by_id(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(f"expected an object, but got {json_kind(value)} instead.")
    bias: dict[int, float] = {}
    for key, addend in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise _invalid("every key must be a token id of the model's vocabulary.")
        number = isinstance(addend, int | float) and not isinstance(addend, bool)
        if not number or not -100 <= addend <= 100:  # NaN fails the comparison
            raise _invalid(f"the bias of token {key} must be a number from -100 to 100.")
        bias[int(key)] = float(addend)
    return bias


class WireModel(BaseModel):
    """Strict types ("0.5" is no number, true is no integer) and unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ChatMessage(WireModel):
    """One message. Its content is text by now, "" when it was null or absent."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_content_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class StreamOptions(WireModel):
    """`include_usage` asks for one more chunk with the token counts."""

    include_usage: bool | None = None


class RelayBody(WireModel):
    """The `relay` object of a request; null means the default everywhere."""

    policy: str | None = None
    store: bool | None = None
    explain: bool | None = None


class ChatCompletionRequest(WireModel):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = None  # null: the model that is served
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # wins over max_tokens
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 are off
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None  # ignored without stream
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias_by_id)] = Field(
        default_factory=dict
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    ignore_eos: bool | None = None
    relay_session: str | None = None
    relay: RelayBody | None = None
    metadata: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_change_the_answer(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, is_harmless in _UNSUPPORTED.items():
                if body.get(name) is not None and not is_harmless(body[name]):
                    message = f"'{name}' with this value is not supported by this server yet."
                    raise bad_request(message, param=name, code="unsupported_parameter")
        return body

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for beside the chosen token; None when no log-probabilities are."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's limit as asked for, before it is cut to the room in the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _never(_value: object) -> bool:
    return False


def _is_empty(value: object) -> bool:
    return value == [] or value == {}


def _is_text_format(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


# Fields that are known and would change the answer, each with the values that would not.
_UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "tools": _is_empty,
    "functions": _is_empty,
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": _is_text_format,
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


class TokenizeRequest(WireModel):
    """Body of POST /tokenize: plain text, or messages that go through the chat template."""

    text: str | None = None
    prompt: str | None = None  # another name for text
    messages: list[ChatMessage] | None = Field(None, min_length=1)


class DetokenizeRequest(WireModel):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]
