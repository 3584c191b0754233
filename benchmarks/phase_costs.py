"""What a GPU needs at least for a phase: floating-point operations and bytes, on paper.

A phase's floor is the sum over its layers of the larger of operations / peak and bytes /
bandwidth: layers run one after another, and each must do its arithmetic and read its weights and
the KV it attends to once. Not in the model, so that a measured time lies above it: launches, the
host's work, activations, softmax, norms and rotations, KV that is read more than once, and every
kernel's distance from the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paper_setups import Piece

from relaykv.engine.config import ModelConfig
from relaykv.engine.policy import Deviation, Policy
from relaykv.engine.prefill_plan import SpanKind

_VALUE_BYTES = 2  # bfloat16
_INFLUENCE_BYTES = 4
# fp32 operations per rotated element: two products and a sum.
_ROTATION_OPERATIONS = 3


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak rates as published: dense bfloat16 with fp32 accumulation, and memory."""

    name: str
    operations_per_s: float
    bytes_per_s: float


def accelerators() -> tuple[Accelerator, ...]:
    return (
        Accelerator("H100 SXM", 989e12, 3.35e12),
        Accelerator("H200", 989e12, 4.8e12),
        Accelerator("RTX 4090", 165e12, 1.008e12),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one stage: work that can overlap within it and not with other stages."""

    operations: float
    num_bytes: float

    def floor_s(self, accelerator: Accelerator) -> float:
        compute_s = self.operations / accelerator.operations_per_s
        return max(compute_s, self.num_bytes / accelerator.bytes_per_s)


def total(costs: Iterable[Cost]) -> Cost:
    costs = tuple(costs)
    return Cost(sum(c.operations for c in costs), sum(c.num_bytes for c in costs))


def floor_s(costs: Iterable[Cost], accelerator: Accelerator, min_stage_s: float = 0.0) -> float:
    """Seconds that stages take at least, one after another.

    Args:
        min_stage_s: what launching one stage takes the host; a stage cannot be shorter.
    """
    return sum(max(cost.floor_s(accelerator), min_stage_s) for cost in costs)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What one layer of one step works on."""

    num_projected: int  # rows whose query, key and value are computed
    num_finished: int  # rows that attend and go through the feed-forward
    num_scores: float  # keys seen, summed over the finished rows
    num_keys: int  # cached keys that are read at least once


def num_parameters(config: ModelConfig) -> int:
    """Of all matrices; norms and biases are left out."""
    layers = config.num_layers * sum(_layer_parameters(config))
    embeddings = 1 if config.tie_word_embeddings else 2
    return layers + embeddings * config.vocab_size * config.hidden_size


def kv_bytes(config: ModelConfig) -> int:
    """Keys and values of one token, all layers."""
    return config.num_layers * _layer_kv_bytes(config)


def prefill(config: ModelConfig, pieces: Sequence[Piece], policy: Policy) -> list[Cost]:
    """Stages of a prompt in one step: the relay copy, the layers, one row's logits.

    Args:
        pieces: the prompt in order. RELAY pieces are treated as the policy says, with its
            expected share where only the data decides.
    """
    num_relayed = sum(p.num_tokens for p in pieces if p.kind is SpanKind.RELAY)
    costs = [shift_copy(config, num_relayed)] if num_relayed else []
    for layer in range(config.num_layers):
        costs.append(_layer_cost(config, _layer_rows(pieces, policy, layer)))
    return [*costs, _logits_cost(config, 1)]


def decode(config: ModelConfig, batch: int, context: int) -> list[Cost]:
    """Stages of a step that decodes a row for each of `batch` requests of `context` tokens."""
    keys = batch * (context + 1)
    layer = _layer_cost(config, LayerRows(batch, batch, keys, keys))
    return [*[layer] * config.num_layers, _logits_cost(config, batch)]


def shift_copy(config: ModelConfig, num_tokens: int) -> Cost:
    """Reads and writes KV of all layers, the hidden state and the influence of every token."""
    per_token = kv_bytes(config) + config.hidden_size * _VALUE_BYTES + _INFLUENCE_BYTES
    rotated = config.num_layers * config.num_kv_heads * config.rope.rotary_dim
    return Cost(_ROTATION_OPERATIONS * num_tokens * rotated, 2 * num_tokens * per_token)


def num_selected(policy: Policy, num_tokens: int) -> int:
    """Tokens of a segment that are computed again, as far as a policy's data say."""
    selection = policy.selection
    if selection.deviation is Deviation.NONE:
        first = max(selection.num_first, math.ceil(selection.first_share * num_tokens))
        return min(first + selection.num_last, num_tokens)
    share = selection.deviation_share
    return math.ceil((selection.expected_share if share is None else share) * num_tokens)


def _layer_rows(pieces: Sequence[Piece], policy: Policy, layer: int) -> LayerRows:
    projected = finished = start = 0
    scores = 0.0
    for piece in pieces:
        stop = start + piece.num_tokens
        if piece.kind is SpanKind.COMPUTE:
            projected += piece.num_tokens
            finished += piece.num_tokens
            scores += _sum_of_keys(start, stop)
        elif piece.kind is SpanKind.RELAY:
            more_projected, active = _relayed_rows(policy, layer, piece.num_tokens)
            projected += more_projected
            finished += active
            # Rows chosen by the data are taken to lie evenly over the segment.
            first_only = policy.selection.deviation is Deviation.NONE
            chosen_stop = start + active if first_only else stop
            mean_keys = _sum_of_keys(start, chosen_stop) / max(chosen_stop - start, 1)
            scores += active * mean_keys
        start = stop
    return LayerRows(projected, finished, scores, start)


def _relayed_rows(policy: Policy, layer: int, num_tokens: int) -> tuple[int, int]:
    """Rows of a relayed segment that are projected, and that are finished, at a layer."""
    bands = policy.bands
    if bands is None or not bands.inject <= layer <= bands.stop:
        return 0, 0
    chosen = num_selected(policy, num_tokens)
    if bands.inject == bands.select and policy.selection.deviation is Deviation.NONE:
        return chosen, chosen
    if layer < bands.select:
        return num_tokens, num_tokens
    return (num_tokens if layer == bands.select else chosen), chosen


def _sum_of_keys(start: int, stop: int) -> float:
    """Keys that rows at positions [start, stop) see: each position and all before it."""
    return (stop - start) * (start + 1 + stop) / 2


def _layer_cost(config: ModelConfig, rows: LayerRows) -> Cost:
    qkv, rest = _layer_parameters(config)
    heads = config.num_heads * config.head_dim
    operations = 2.0 * (rows.num_projected * qkv + rows.num_finished * rest)
    operations += 4.0 * heads * rows.num_scores  # scores, and their sum of values
    layer_kv = _layer_kv_bytes(config)
    num_bytes = _VALUE_BYTES * (qkv + rest) + layer_kv * (rows.num_keys + rows.num_projected)
    return Cost(operations, num_bytes)


def _logits_cost(config: ModelConfig, num_rows: int) -> Cost:
    head = config.vocab_size * config.hidden_size
    return Cost(2.0 * num_rows * head, _VALUE_BYTES * head)


def _layer_parameters(config: ModelConfig) -> tuple[int, int]:
    """Of the fused query, key and value projection, and of the rest of a layer."""
    hidden, dim = config.hidden_size, config.head_dim
    qkv = hidden * (config.num_heads + 2 * config.num_kv_heads) * dim
    rest = config.num_heads * dim * hidden + 3 * hidden * config.intermediate_size
    return qkv, rest


def _layer_kv_bytes(config: ModelConfig) -> int:
    return 2 * config.num_kv_heads * config.head_dim * _VALUE_BYTES
