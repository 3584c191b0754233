"""Values that describe one generation: what a caller asks for, and what it gets back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from relaykv.engine.relay_report import RelayReport


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-turn token, a stop string or a stop token id
    LENGTH = "length"  # max_tokens or the model's context length
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # the engine failed; the request's text so far is all there is


class GrammarKind(enum.StrEnum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # JSON on one line that satisfies the schema
    LARK = "lark"  # llguidance's dialect of Lark


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like, as text; `engine/grammar.py` checks and compiles it."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Every field is already validated (the server parses)."""

    max_tokens: int  # tokens to generate at most, >= 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None  # None draws one from the operating system
    frequency_penalty: float = 0.0  # per occurrence among the generated tokens
    presence_penalty: float = 0.0  # once for every distinct generated token
    repetition_penalty: float = 1.0  # over prompt and generated tokens; 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, addend)
    stop: tuple[str, ...] = ()  # generation ends before the first of these; never returned
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: no log-probabilities; n: the chosen one and the top n
    num_prompt_logprobs: int | None = None  # likewise of the prompt, all of which is then computed
    grammar: GrammarSpec | None = None  # once it is satisfied only an end-of-turn token may follow


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What a caller wants of relaying. Without a session nothing approximate ever happens."""

    session: str | None = None
    policy: str | None = None  # None takes the server's default for sessions
    store: bool = True  # whether the finished request becomes a recording
    explain: bool = False  # whether the report lists segments and runs
    # Names the kind of agent that asks, as one that asks again would; "": the engine finds one.
    agent_class: str = ""
    not_from: str = ""  # id of a request whose recording is not to be relayed from
    question: str = ""  # names what the agent is asked, the same for all who are asked the same


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate, as the engine receives it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    relay: RelayOptions = RelayOptions()
    tenant: str = ""  # whose cache this may read and write; from the API key


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the likeliest alternatives.

    Taken from the model's own distribution, before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `num_cached_tokens` is prefix + relayed, not recomputed."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new since the previous output of the same request."""

    request_id: str
    text: str  # new text only; may be empty while characters are incomplete or may be a stop
    token_ids: tuple[int, ...]  # new token ids; a stop token is not among them
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()  # one per entry of token_ids when asked for
    # On the first output when asked for: of every token of the prompt but the first.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None  # set exactly once, on the last output
    relay: RelayReport | None = None  # on the first and on the last output
    error: str | None = field(default=None)  # a message when finish_reason is ERROR
