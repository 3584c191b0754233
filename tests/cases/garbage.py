"""Hypothesis strategies for request bodies that nobody should send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that goes into the body as it stands: Python has no value for it, or no legal one."""

    text: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """An object that may name a key twice."""

    pairs: tuple[tuple[str, Any], ...]


def dump(value: Any) -> str:
    """JSON text, but for what `Raw` smuggles in."""
    match value:
        case Raw(text):
            return text
        case Pairs(pairs):
            return "{" + ",".join(f"{json.dumps(key)}:{dump(entry)}" for key, entry in pairs) + "}"
        case dict():
            return dump(Pairs(tuple(value.items())))
        case list():
            return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


_RAW = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "1e-320", "1" + "0" * 400),
        *(
            "9" * 5000,
            '"\\ud800"',
            '"\\udfff x"',
            '"\\u0000"',
            '"a\\ud83d\\ude38"',
            "01",
            "nul",
            "",
        ),
        *("[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "[" * 3000 + "]" * 3000),
        *("'x'", "/* */ 1", "\ufeff1", "\x00"),
    ]
).map(Raw)
_NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 2, 3, 16, 17, 255, 256, 257, 258, 271, 272, 300, 10**6, 10**30),
        *(2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64),
        *(0.0, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e-310, 1e30),
    ]
)
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=6),  # with half surrogates
    st.sampled_from(
        ["", "\x00", "<|im_end|>", "refuse", "full", "relay", "text", "user", "s/../t"]
    ),
)
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS, _RAW)
ANYTHING = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(_TEXTS, inner, max_size=4),
        st.lists(st.tuples(st.sampled_from(["a", "type", "role"]), inner), max_size=4).map(
            lambda pairs: Pairs(tuple(pairs))
        ),
    ),
    max_leaves=8,
)


def _or_anything(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what is asked for, so that enough gets past the first check."""
    return st.sampled_from([*[False] * 24, True]).flatmap(lambda bad: ANYTHING if bad else good)


_PARTS = st.fixed_dictionaries(
    {"type": _or_anything(st.sampled_from(["text", "input_text", "output_text", "refusal"]))},
    optional={"text": _or_anything(_TEXTS), "refusal": _or_anything(_TEXTS)},
)
_CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": _or_anything(st.just("call_1")),
        "type": _or_anything(st.just("function")),
        "index": ANYTHING,
        "function": _or_anything(
            st.fixed_dictionaries(
                {},
                optional={
                    "name": _or_anything(st.just("get")),
                    "arguments": _or_anything(
                        st.sampled_from(["{}", '{"a": [1]}', "{", "[" * 9999])
                    ),
                },
            )
        ),
    },
)
_ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
_MESSAGES = st.fixed_dictionaries(
    {
        "role": _or_anything(_ROLES),
        "content": _or_anything(st.one_of(_TEXTS, st.none(), st.lists(_PARTS, max_size=2))),
    },
    optional={
        "name": _or_anything(_TEXTS),
        "tool_call_id": _or_anything(_TEXTS),
        "tool_calls": _or_anything(st.lists(_or_anything(_CALLS), max_size=2)),
        "refusal": ANYTHING,
        "unknown": ANYTHING,
    },
)
_FLOATS = st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats(-3, 3), _NUMBERS)
_SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "string", "maxLength": 3},
        {"type": "nonsense"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"pattern": "(", "type": "string"},
        True,
        {},
    ]
)
_TOOLS = st.fixed_dictionaries(
    {"type": _or_anything(st.just("function"))},
    optional={
        "name": _or_anything(st.just("get")),
        "parameters": _or_anything(_SCHEMAS),
        "function": _or_anything(
            st.fixed_dictionaries(
                {"name": _or_anything(st.just("get"))},
                optional={"parameters": _or_anything(_SCHEMAS), "description": ANYTHING},
            )
        ),
    },
)
_FORMATS = st.fixed_dictionaries(
    {"type": _or_anything(st.sampled_from(["text", "json_object", "json_schema", "grammar"]))},
    optional={
        "name": ANYTHING,
        "schema": _or_anything(_SCHEMAS),
        "json_schema": _or_anything(
            st.fixed_dictionaries(
                {"name": _or_anything(st.just("r"))}, optional={"schema": _SCHEMAS}
            )
        ),
    },
)
_IDS = st.lists(_or_anything(st.integers(0, 300)), max_size=5)
# Every field that any route reads; each route ignores those of the others.
_FIELDS: Mapping[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["org/tiny", "tiny", "org/bytes", "bytes", "openai/org/bytes"]),
    "temperature": _FLOATS,
    "top_p": _FLOATS,
    "top_k": _NUMBERS,
    "min_p": _FLOATS,
    "n": st.integers(0, 3),
    "best_of": st.integers(0, 3),
    "max_completion_tokens": st.integers(0, 5),
    "stop": st.one_of(_TEXTS, st.lists(_TEXTS, max_size=5)),
    "stop_token_ids": _IDS,
    "seed": _NUMBERS,
    "frequency_penalty": _FLOATS,
    "presence_penalty": _FLOATS,
    "repetition_penalty": _FLOATS,
    "logit_bias": st.dictionaries(_NUMBERS.map(str), _NUMBERS, max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 6)),
    "top_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "suffix": _TEXTS,
    "ignore_eos": st.booleans(),
    "stream_options": st.dictionaries(st.just("include_usage"), _or_anything(st.booleans())),
    "relay_session": _TEXTS,
    "relay": st.fixed_dictionaries(
        {},
        optional={
            "policy": _or_anything(
                st.sampled_from(["full", "shift", "relay", "epic", "cacheblend"])
            ),
            "store": _or_anything(st.booleans()),
            "explain": _or_anything(st.booleans()),
        },
    ),
    "metadata": st.dictionaries(st.sampled_from(["relay_session", "run"]), ANYTHING, max_size=2),
    "tools": st.lists(_or_anything(_TOOLS), max_size=2),
    "tool_choice": st.one_of(st.sampled_from(["auto", "none", "required"]), _TOOLS),
    "parallel_tool_calls": st.booleans(),
    "response_format": _FORMATS,
    "instructions": _TEXTS,
    "previous_response_id": st.sampled_from(["resp_1", ""]),
    "store": st.booleans(),
    "max_output_tokens": st.integers(0, 5),
    "top_logprobs ": ANYTHING,
    "functions": ANYTHING,
    "text": st.one_of(_TEXTS, st.fixed_dictionaries({"format": _or_anything(_FORMATS)})),
    "tokens": _IDS,
    "include": ANYTHING,
    "unknown": ANYTHING,
}
_ITEMS = st.fixed_dictionaries(
    {"type": _or_anything(st.sampled_from(["message", "function_call", "function_call_output"]))},
    optional={
        "role": _or_anything(_ROLES),
        "content": _or_anything(st.one_of(_TEXTS, st.lists(_PARTS, max_size=2))),
        "call_id": _or_anything(st.just("call_1")),
        "name": _or_anything(st.just("get")),
        "arguments": _or_anything(st.just("{}")),
        "output": _or_anything(_TEXTS),
    },
)
_ESSENTIALS: Mapping[str, st.SearchStrategy[Any]] = {
    "messages": _or_anything(st.lists(_or_anything(_MESSAGES), min_size=1, max_size=3)),
    "prompt": _or_anything(st.one_of(_TEXTS, st.lists(_TEXTS, max_size=3), _IDS)),
    "input": _or_anything(st.one_of(_TEXTS, st.lists(_or_anything(_ITEMS), max_size=3))),
    "text": _or_anything(_TEXTS),
    "tokens": _or_anything(_IDS),
    "max_tokens": _or_anything(st.integers(1, 4)),
    "max_output_tokens": _or_anything(st.integers(1, 4)),
    "stream": _or_anything(st.booleans()),
}
ROUTES: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages", "max_tokens", "stream"),
    "/s/agent%20one/v1/chat/completions": ("messages", "max_tokens", "stream"),
    "/v1/completions": ("prompt", "max_tokens", "stream"),
    "/v1/responses": ("input", "max_output_tokens", "stream"),
    "/tokenize": ("text",),
    "/detokenize": ("tokens",),
}


@st.composite
def _objects(draw: st.DrawFn, path: str) -> bytes:
    """What the route needs and a handful of other fields: all at once would never be all right."""
    names = draw(st.lists(st.sampled_from(sorted(_FIELDS)), max_size=4, unique=True))
    body = {name: draw(_or_anything(_FIELDS[name])) for name in names}
    body |= {name: draw(_ESSENTIALS[name]) for name in ROUTES[path]}
    return dump(body).encode()


def _broken(body: bytes, at: int, piece: bytes) -> bytes:
    at %= len(body) + 1
    return body[:at] + piece + body[at:][len(piece) :]


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bodies for a route, from nearly right to no text at all."""
    objects = _objects(path)
    return st.one_of(
        objects,
        objects,
        objects,
        objects,
        ANYTHING.map(lambda value: dump(value).encode("utf-8", "replace")),
        st.builds(_broken, objects, st.integers(0, 400), st.binary(max_size=4)),
        objects.map(lambda body: b"\xef\xbb\xbf" + body),
        objects.map(lambda body: b'{"max_tokens": "twice", ' + body[1:]),
        st.binary(max_size=20),
        st.sampled_from([b"", b" ", b"\x00", b"\xef\xbb\xbf", b"[" * 100_000, b'{"a":' * 20_000]),
    )


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Content-Type": st.sampled_from(
            ["text/plain", "application/x-www-form-urlencoded", "\xff"]
        ),
        "Content-Encoding": st.sampled_from(["identity"] * 9 + ["gzip", "x"]),
        "X-Relay-Session": st.text(st.characters(max_codepoint=255), max_size=8),
        "Authorization": st.sampled_from(["Bearer a", "Bearer", "\xff"]),
        "X-Request-Id": st.sampled_from(["a b", "\xff", "x" * 300]),
    },
)
