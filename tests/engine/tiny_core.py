"""A whole engine core around a tiny random model and a tokenizer that spells ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from tiny_models import save_tiny_model

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.client import ModelCard
from relaykv.engine.config import CacheConfig, RelayConfig, SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.loader import load_model
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Bands, builtin_policies
from relaykv.engine.request import (
    GenerateRequest,
    RelayOptions,
    RequestOutput,
    SamplingParams,
)
from relaykv.engine.tokenizer import Tokenizer


class SpellingTokenizer:
    """Token 17 reads "17 ", so a text says which tokens it came from."""

    def stream(self) -> SpellingTokenizer:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


@cache
def tiny_model() -> DecoderModel:
    with TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), "llama", tied=False)
        return load_model(Path(folder), torch.float32, torch.device("cpu"))


def tiny_core(**sizes: int) -> EngineCore:
    return build_core(tiny_parts(**sizes))


def tiny_parts(
    num_blocks: int = 256,
    max_num_batched_tokens: int = 64,
    max_num_requests: int = 8,
    max_model_len: int = 400,
) -> EngineParts:
    model = tiny_model()
    policies = builtin_policies(model.config.num_layers, Bands(1, 2, 2))
    card = ModelCard("tiny", max_model_len, model.config.vocab_size, 0)
    return EngineParts(
        folder=Path(),
        model=model,
        tokenizer=cast(Tokenizer, SpellingTokenizer()),
        fingerprint="tiny",
        policies=policies,
        hidden_layer=1,
        cache=CacheConfig(num_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens, max_num_requests, max_model_len),
        relay=RelayConfig(num_offsets=30),
        card=card,
    )


@dataclass(slots=True)
class Result:
    """What a request was answered in all."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def relay(self) -> Any:
        return self.last.relay


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 20,
    session: str | None = None,
    policy: str | None = None,
    tenant: str = "",
    store: bool = True,
    **sampling: Any,
) -> GenerateRequest:
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens, **params),
        RelayOptions(session, policy, store, explain=True),
        tenant,
    )


def run(core: EngineCore, *requests: GenerateRequest) -> list[Result]:
    """Serves requests together until all have ended."""
    results = {r.request_id: Result() for r in requests}
    for item in requests:
        core.add(item)
    while core.has_work:
        for output in core.step():
            take(results[output.request_id], output)
    return list(results.values())


def take(result: Result, output: RequestOutput) -> None:
    result.token_ids.extend(output.token_ids)
    result.text += output.text
    result.outputs.append(output)


def ids(seed: int, count: int) -> list[int]:
    """Distinct-looking random tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return cast(list[int], torch.randint(3, 150, (count,), generator=generator).tolist())
