"""Models whose relayed values deviate exactly where a test wants it, and hand-offs for them.

The hidden state has a half that depends on the token alone and two blocks that one layer, the
mixing one, fills by attention: block 0 from its first head, block 1 from its second. Nothing else
writes to it. So up to the mixing layer values cannot depend on the text before them, and above it
each layer's values deviate as much as that layer reads of a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from byte_tokenizer import byte_tokenizer
from torch import Tensor

from relaykv.engine.assembly import EngineParts
from relaykv.engine.client import ModelCard
from relaykv.engine.config import (
    CacheConfig,
    ModelConfig,
    RelayConfig,
    RopeConfig,
    SchedulerConfig,
)
from relaykv.engine.handoff import Consumer, Handoff, Producer
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.models.layers import LayerWeights
from relaykv.engine.policy import Bands, builtin_policies

HIDDEN, HALF, BLOCK = 64, 32, 16
NUM_HEADS, HEAD_DIM = 2, 16
MAX_MODEL_LEN = 1024
_NUM_PRINTABLE = 95
_FIRST_PRINTABLE = 3
_WORDS = ("ferry", "lamp", "stone", "river", "bread", "clock", "garden", "paper", "winter")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one layer's values read beside the token: how much, and of which block."""

    gain: float
    block: int = 0


def planted_model(readings: Sequence[Reading], mixing_layer: int | None) -> DecoderModel:
    """A model with one layer per reading; without a mixing layer nothing depends on context."""
    generator = torch.Generator().manual_seed(5)

    def normal(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        weights: Tensor = torch.randn(rows, columns, generator=generator)
        return weights.mul_(spread / columns**0.5)

    tokenizer = byte_tokenizer(ascii_only=True)
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_layers=len(readings),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        max_model_len=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0, HEAD_DIM),
        qkv_bias=False,
        qk_norm=False,
        attention_out_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        eos_token_ids=(2,),
    )
    # The same for all layers, so that layers that read the same block rank tokens alike.
    of_token = normal(NUM_HEADS * HEAD_DIM, HALF)
    of_block = normal(NUM_HEADS * HEAD_DIM, BLOCK)
    # Sharp attention: which earlier token a head looks at is then a matter of the token.
    query_key = normal(2 * NUM_HEADS * HEAD_DIM, HALF, spread=4.0)
    layers = []
    for index, reading in enumerate(readings):
        qkv = torch.zeros(3 * NUM_HEADS * HEAD_DIM, HIDDEN)
        qkv[: 2 * NUM_HEADS * HEAD_DIM, :HALF] = query_key
        qkv[2 * NUM_HEADS * HEAD_DIM :, :HALF] = of_token
        start = HALF + BLOCK * reading.block
        qkv[2 * NUM_HEADS * HEAD_DIM :, start : start + BLOCK] = reading.gain * of_block
        out = torch.zeros(HIDDEN, NUM_HEADS * HEAD_DIM)
        if index == mixing_layer:
            out[HALF:] = torch.eye(NUM_HEADS * HEAD_DIM)  # head h fills block h
        layers.append(_layer(qkv, out))
    embedding = torch.zeros(config.vocab_size, HIDDEN)
    embedding[:, :HALF] = torch.randn(config.vocab_size, HALF, generator=generator)
    # Only characters that a text is read back as are ever likely.
    head = torch.zeros(config.vocab_size, HIDDEN)
    printable = slice(_FIRST_PRINTABLE, _FIRST_PRINTABLE + _NUM_PRINTABLE)
    head[printable] = normal(_NUM_PRINTABLE, HIDDEN)
    return DecoderModel(config, embedding, tuple(layers), torch.ones(HIDDEN), head)


def planted_parts(model: DecoderModel) -> EngineParts:
    last = model.config.num_layers - 1
    return EngineParts(
        folder=Path(),
        model=model,
        tokenizer=byte_tokenizer(ascii_only=True),
        fingerprint="planted:float32",
        policies=builtin_policies(model.config.num_layers, Bands(0, min(1, last), last)),
        hidden_layer=0,
        cache=CacheConfig(64),
        scheduler=SchedulerConfig(max_num_batched_tokens=128, max_model_len=MAX_MODEL_LEN),
        relay=RelayConfig(),
        card=ModelCard("planted", MAX_MODEL_LEN, model.config.vocab_size, 0),
    )


def prompt(system: str, user: str) -> list[int]:
    """Both texts, each with a tilde behind it: the tokenizer knows no line ends."""
    return byte_tokenizer(ascii_only=True).encode(f"{system}~{user}~")


def planted_handoffs(count: int) -> list[Handoff]:
    """Different words everywhere; every third has two producers."""
    chance = random.Random(3)

    def words(number: int) -> str:
        return " ".join(chance.choices(_WORDS, k=number))

    handoffs = []
    for index in range(count):
        producers = tuple(Producer(words(6), words(9)) for _ in range(2 if index % 3 == 2 else 1))
        places = " ".join(f"{{output_{i}}} {words(3)}" for i in range(1, len(producers) + 1))
        consumer = Consumer(words(8), f"{words(5)} {places} {words(4)}")
        handoffs.append(Handoff(f"handoff {index}", "", producers, consumer))
    return handoffs


def _layer(qkv: Tensor, out: Tensor) -> LayerWeights:
    return LayerWeights(
        input_norm=torch.ones(HIDDEN),
        qkv=qkv,
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=out,
        out_bias=None,
        post_norm=torch.ones(HIDDEN),
        gate_up=torch.zeros(16, HIDDEN),
        gate_up_bias=None,
        down=torch.zeros(HIDDEN, 8),
        down_bias=None,
    )
