"""What clients may send to /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from relaykv.server.errors import bad_request, json_kind
from relaykv.server.field_schemas import prompt_schema
from relaykv.server.protocol import MAX_CHOICES, GenerationRequest, invalid_value

MAX_ANSWERS = 128  # prompts times n
MAX_TEXT_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]  # a text, or token ids


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        words = "a string, an array of strings, or one or more arrays of token ids"
        raise invalid_value(f"expected {words}, but got {json_kind(value)} instead.")
    if not value:
        raise invalid_value("expected at least one entry.")
    if _is_id(value[0]):
        return (_token_ids(value),)
    if len(value) > MAX_ANSWERS:
        raise invalid_value(f"at most {MAX_ANSWERS} prompts are allowed.")
    return tuple(_prompt(entry, type(value[0])) for entry in value)


def _prompt(value: object, kind: type) -> Prompt:
    if isinstance(value, kind):  # a list is of one kind
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return _token_ids(value)
    raise invalid_value("every entry must be a string, or every entry an array of token ids.")


def _token_ids(value: list[object]) -> tuple[int, ...]:
    ids = []
    for entry in value:
        if not isinstance(entry, int) or not _is_id(entry):
            raise invalid_value(f"{json_kind(entry)} stands where a token id is expected.")
        if entry < 0:
            raise invalid_value("a token id must not be negative.")
        ids.append(entry)
    return tuple(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _never(_value: object) -> bool:
    return False


class TextCompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, Callable[[object], bool]]] = {
        "suffix": lambda value: value == "",
        "prompt_logprobs": _never,
        "response_format": lambda value: value == {"type": "text"},
        "min_tokens": lambda value: value == 0,
        "guided_json": _never,
        "guided_regex": _never,
        "guided_choice": _never,
        "guided_grammar": _never,
        "structured_outputs": _never,
    }

    prompt: Annotated[
        tuple[Prompt, ...], BeforeValidator(_prompts), WithJsonSchema(prompt_schema(MAX_ANSWERS))
    ]
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)  # answers to every prompt
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None  # the text starts with the prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_TEXT_LOGPROBS)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of not in (None, 1, self.num_choices):
            message = "'best_of' other than 1 or 'n' is not supported by this server yet."
            raise bad_request(message, param="best_of", code="unsupported_parameter")
        if len(self.prompt) * self.num_choices > MAX_ANSWERS:
            message = f"At most {MAX_ANSWERS} answers (prompts times 'n') are allowed."
            raise bad_request(message, param="n")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def wanted_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
