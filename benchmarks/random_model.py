"""Models of a given shape with random weights, and an engine core around one: no download.

Prompts are token ids and a text is the ids spelled out, so no tokenizer file is needed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from model_shapes import ModelShape
from torch import Tensor

from relaykv.engine.assembly import EngineParts
from relaykv.engine.client import ModelCard
from relaykv.engine.config import CacheConfig, DeviceConfig, RelayConfig, SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.models.layers import LayerWeights
from relaykv.engine.policy import Policy, builtin_policies
from relaykv.engine.request import (
    FinishReason,
    GenerateRequest,
    RelayOptions,
    RequestOutput,
    SamplingParams,
)
from relaykv.engine.tokenizer import Tokenizer
from relaykv.kernels.kernel_set import KernelSet

# Standard deviation of the logits: far from uniform, far from one certain token.
_LOGIT_SPREAD = 2.0


class SpellingTokenizer:
    """Token 17 reads "17 "."""

    vocab_size = 1 << 30

    def stream(self) -> SpellingTokenizer:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class CoreSizes:
    """Limits of an engine; lengths are tokens."""

    max_model_len: int
    num_kv_tokens: int
    max_num_batched_tokens: int = 16384  # a whole prompt of the papers' in one step
    max_num_requests: int = 8


def random_model(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet | None = None,
    seed: int = 0,
) -> DecoderModel:
    """Normal weights scaled so that every projection keeps the size of what it is given."""
    config = shape.config
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        weight = torch.randn(
            (rows, columns), dtype=dtype, device=device, generator=generator
        )  # [out, in]
        return weight.mul_(spread / columns**0.5)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    heads = config.num_heads + 2 * config.num_kv_heads
    layers = tuple(
        LayerWeights(
            input_norm=ones(config.hidden_size),
            qkv=normal(heads * config.head_dim, config.hidden_size),
            qkv_bias=None,
            q_norm=ones(config.head_dim) if config.qk_norm else None,
            k_norm=ones(config.head_dim) if config.qk_norm else None,
            out=normal(config.hidden_size, config.num_heads * config.head_dim),
            out_bias=None,
            post_norm=ones(config.hidden_size),
            gate_up=normal(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=None,
            down=normal(config.hidden_size, config.intermediate_size),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    head = normal(config.vocab_size, config.hidden_size, _LOGIT_SPREAD)
    tied = config.tie_word_embeddings
    embedding = head if tied else normal(config.vocab_size, config.hidden_size)
    norm = ones(config.hidden_size)
    return DecoderModel(config, embedding, layers, norm, head, kernels)


def core_parts(
    model: DecoderModel,
    shape: ModelShape,
    sizes: CoreSizes,
    device: DeviceConfig,
    policies: tuple[Policy, ...] = (),
) -> EngineParts:
    """Parts of an engine without end-of-turn tokens.

    Args:
        policies: served beside the built-in ones.
    """
    config = model.config
    named = builtin_policies(config.num_layers, shape.bands)
    block_size = CacheConfig(1).block_size
    return EngineParts(
        folder=Path(),
        model=model,
        tokenizer=cast(Tokenizer, SpellingTokenizer()),
        fingerprint=f"random {shape.name}",
        policies={**named, **{policy.name: policy for policy in policies}},
        hidden_layer=shape.bands.inject,
        cache=CacheConfig(-(-sizes.num_kv_tokens // block_size), block_size),
        scheduler=SchedulerConfig(
            sizes.max_num_batched_tokens, sizes.max_num_requests, sizes.max_model_len
        ),
        relay=RelayConfig(),
        card=ModelCard(shape.name, sizes.max_model_len, config.vocab_size, 0),
        device=device,
    )


def random_ids(seed: str, count: int, vocab_size: int) -> list[int]:
    """Tokens that no other seed gives in the same order."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    relay: RelayOptions | None = None,
    **sampling: float | int | None,
) -> GenerateRequest:
    """Greedy unless `sampling` says otherwise; always `max_tokens` long."""
    params: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    made = SamplingParams(max_tokens, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id, tuple(prompt), made, relay or RelayOptions())


def serve(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[RequestOutput]]:
    """Serves requests together until all have ended; their outputs by id.

    Raises:
        RuntimeError: the engine ended one of them with an error.
    """
    outputs: dict[str, list[RequestOutput]] = {item.request_id: [] for item in requests}
    for item in requests:
        core.add(item)
    while core.has_work:
        for output in core.step():
            if output.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
