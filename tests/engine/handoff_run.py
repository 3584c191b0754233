"""Hand-offs served by a core whose attention may be changed between two agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiny_core import Result, run

from relaykv.engine.assembly import EngineParts
from relaykv.engine.core import EngineCore
from relaykv.engine.handoff import Handoff
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams
from relaykv.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens to generate."""

    writer: int
    reader: int


def chat(tokenizer: Tokenizer, system: str, user: str) -> tuple[int, ...]:
    """A prompt in the default model's own format."""
    parts = (("system", system), ("user", user))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in parts)
    return tuple(tokenizer.encode(f"{text}<|im_start|>assistant\n"))


def write(
    core: EngineCore, parts: EngineParts, handoffs: Sequence[Handoff], limits: Limits
) -> list[str]:
    """Lets the first producer of every hand-off write; what each wrote."""
    requests = [
        _request(
            f"writer-{handoff.id}",
            chat(parts.tokenizer, handoff.producers[0].system, handoff.producers[0].user),
            limits.writer,
            RelayOptions(handoff.id, "full"),
        )
        for handoff in handoffs
    ]
    return [result.text for result in run(core, *requests)]


def read(
    core: EngineCore,
    parts: EngineParts,
    handoffs: Sequence[Handoff],
    texts: Sequence[str],
    policy: str,
    limits: Limits,
) -> list[Result]:
    """Lets every consumer read its producer's text; records nothing."""
    requests = [
        _request(
            f"{policy}-{handoff.id}",
            chat(parts.tokenizer, handoff.consumer.system, handoff.consumer.user([text] * 9)),
            limits.reader,
            RelayOptions(handoff.id, policy, store=False),
        )
        for handoff, text in zip(handoffs, texts, strict=True)
    ]
    return run(core, *requests)


def _request(
    request_id: str, prompt: tuple[int, ...], max_tokens: int, relay: RelayOptions
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=2)
    return GenerateRequest(request_id, prompt, sampling, relay, "")
