"""JSON schemas of fields that are read by hand, as the OpenAPI document tells them."""

from __future__ import annotations

from typing import Any


def _text_part(kinds: tuple[str, ...], field: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", field],
        "properties": {"type": {"enum": list(kinds)}, field: {"type": "string"}},
    }


def content_schema() -> dict[str, Any]:
    """A message's content: a text, nothing, or an array of texts and text parts."""
    texts = _text_part(("text", "input_text", "output_text"), "text")
    entries = [{"type": "string"}, texts, _text_part(("refusal",), "refusal")]
    array = {"type": "array", "items": {"anyOf": entries}}
    return {"anyOf": [{"type": "string"}, {"type": "null"}, array]}


def stop_schema(max_strings: int) -> dict[str, Any]:
    """A stop string or several; none of them empty."""
    string = {"type": "string", "minLength": 1}
    array = {"type": "array", "items": string, "maxItems": max_strings}
    return {"anyOf": [string, {"type": "null"}, array]}


def bias_schema() -> dict[str, Any]:
    """An addend by token id."""
    return {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }


def prompt_schema(max_prompts: int) -> dict[str, Any]:
    """A text or token ids, or several of one kind."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": max_prompts}
    several = {"type": "array", "items": ids, "minItems": 1, "maxItems": max_prompts}
    return {"anyOf": [{"type": "string"}, ids, texts, several]}


def tool_choice_schema() -> dict[str, Any]:
    """Whether tools may or must be called."""
    name = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    named = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": name},
    }
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "null"}, named]}


def response_format_schema() -> dict[str, Any]:
    """Text, any JSON object, or JSON that satisfies a schema."""
    free = {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object"]}},
    }
    wrapper = {
        "type": "object",
        "required": ["schema"],
        "properties": {
            "name": {"type": "string"},
            "schema": {"type": "object"},
            "strict": {"type": ["boolean", "null"]},
        },
    }
    with_schema = {
        "type": "object",
        "required": ["type", "json_schema"],
        "properties": {"type": {"const": "json_schema"}, "json_schema": wrapper},
    }
    return {"anyOf": [free, {"type": "null"}, with_schema]}
