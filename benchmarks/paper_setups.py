"""The papers' efficiency set-ups as chains of agents, and the figures they print for them.

Agent i's prompt is its own prefix, a short text, perhaps a question, and what the agents before
it wrote, with a short text behind each. Every agent has a prefix of its own: in RelayCaching's
benchmark all agents share one and append, so that an exact prefix cache, which the paper does
not have, would find whole prompts and leave nothing to relay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relaykv.engine.prefill_plan import SpanKind


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt that are treated alike."""

    kind: SpanKind
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """Time to first token as printed, in ms by agent; the agents start at `first_agent`."""

    source: str
    machine: str
    first_agent: int
    full_ms: tuple[float, ...]  # without prefix caching
    reuse_ms: Mapping[str, tuple[float, ...]]  # by method

    def ratio(self, method: str, agent: int) -> float:
        """How much faster than a full prefill."""
        index = agent - self.first_agent
        return self.full_ms[index] / self.reuse_ms[method][index]


@dataclass(frozen=True, slots=True)
class Setup:
    """A chain of agents. Lengths are tokens."""

    name: str
    num_prefix: int
    num_question: int  # 0: none
    num_output: int  # that every agent writes
    num_glue: int  # behind the prefix, the question and every output
    agents: tuple[int, ...]  # that are measured; 1 is the first
    paper: PaperFigures

    def num_prompt_tokens(self, agent: int) -> int:
        return sum(piece.num_tokens for piece in self.pieces(agent, True))

    def pieces(self, agent: int, relays: bool) -> tuple[Piece, ...]:
        """An agent's prompt, with its prefix in the exact prefix cache.

        The last token of an output has no KV when the output ends: it is computed by the next
        agent, and relayed from there later. The question is known from the second agent on.
        """
        pieces = [Piece(SpanKind.PREFIX, self.num_prefix), Piece(SpanKind.COMPUTE, self.num_glue)]
        reuse = SpanKind.RELAY if relays else SpanKind.COMPUTE
        if self.num_question:
            kind = reuse if agent > 1 else SpanKind.COMPUTE
            pieces.append(Piece(kind, self.num_question))
            pieces.append(Piece(SpanKind.COMPUTE, self.num_glue))
        for writer in range(1, agent):
            unknown = int(writer == agent - 1)
            pieces.append(Piece(reuse, self.num_output - unknown))
            pieces.append(Piece(SpanKind.COMPUTE, unknown + self.num_glue))
        return tuple(pieces)


def cold(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same prompt on a server that has seen nothing of it, which is the papers' baseline."""
    return (Piece(SpanKind.COMPUTE, sum(piece.num_tokens for piece in pieces)),)


def relaycaching() -> Setup:
    """RelayCaching (arXiv 2603.13289), Table 2, on the shape of Qwen3-0.6B."""
    figures = PaperFigures(
        source="RelayCaching, Table 2",
        machine="H20, HF Transformers",
        first_agent=2,
        full_ms=(85.2, 180.2, 321.5, 493.9),
        reuse_ms={
            "cacheblend": (44.9, 76.7, 112.5, 159.3),
            "relay": (40.6, 57.0, 73.2, 104.8),
        },
    )
    return Setup("relaycaching", 512, 0, 2048, 16, (2, 3, 4, 5), figures)


def kvcomm() -> Setup:
    """KVCOMM (arXiv 2510.12872), Table 2, on the shape of Llama-3.1-8B.

    The table gives no times of KVCOMM itself but its parts; these are the sums.
    """
    figures = PaperFigures(
        source="KVCOMM, Table 2",
        machine="H100, HF Transformers",
        first_agent=1,
        full_ms=(125.8, 192.4, 258.3, 330.9, 428.6),
        reuse_ms={"kvcomm": (113.5, 38.0, 42.1, 48.3, 54.8)},
    )
    return Setup("kvcomm", 512, 1024, 512, 16, (1, 2, 3, 4, 5), figures)


def toy(setup: Setup) -> Setup:
    """The same chain in a thirty-second of its lengths."""
    return replace(
        setup,
        name=f"toy {setup.name}",
        num_prefix=setup.num_prefix // 32,
        num_question=setup.num_question // 32,
        num_output=max(setup.num_output // 32, 48),
    )
