"""How a segment's KV, computed in its place, differs from the KV recorded of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relaykv.kernels.rope import apply_rope

# Tokens that are compared at a time: fp32 copies of their keys in all layers are made.
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SegmentOffset:
    """Of keys and of values."""

    mean: Tensor  # fp32 [2, L, Hkv, D], over the tokens
    energy: Tensor  # fp32 [2], the squared difference of all tokens together
    num_tokens: int

    def energy_without(self, offset: Tensor) -> Tensor:
        """The squared difference that is left when `offset`, [2, L, Hkv, D], is taken off.

        The scatter around the mean stays; what the mean is off by counts for every token.
        """
        scatter = self.energy - self.num_tokens * _squares(self.mean)
        return scatter.clamp_min(0.0) + self.num_tokens * _squares(self.mean - offset)


def segment_offset(
    k: Tensor, v: Tensor, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> SegmentOffset:
    """Compares the tokens in slots `target` with those recorded in slots `source`.

    Keys are turned back to a segment that starts at position 0, so that offsets found at
    different positions can be averaged.

    Args:
        k, v: the cache, [L, S, Hkv, D].
        source, target: int64 [n] slots, n >= 1.
        cos, sin: fp32 [2, r / 2], of minus the position of the first token in the recording, and
            of minus its position now.
    """
    num_layers, _, *row = k.shape
    total = k.new_zeros((2, num_layers, *row), dtype=torch.float32)
    energy = k.new_zeros(2, dtype=torch.float32)
    for _, differences in token_offsets(k, v, source, target, cos, sin):
        for part, difference in enumerate(differences):
            total[part] += difference.sum(dim=1)
            energy[part] += difference.square().sum()
    num_tokens = source.shape[0]
    return SegmentOffset(total / num_tokens, energy, num_tokens)


def token_offsets(
    k: Tensor, v: Tensor, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """What the tokens in slots `target` have more than those in slots `source`, part by part.

    Takes what `segment_offset` takes. Yields which of the tokens, and the differences of their
    keys, turned back to a segment that starts at position 0, and of their values, fp32
    [L, part, Hkv, D].
    """
    for start in range(0, source.shape[0], _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        keys = _turned(k, target[part], cos[1:], sin[1:])
        keys -= _turned(k, source[part], cos[:1], sin[:1])
        values = v.index_select(1, target[part]).float() - v.index_select(1, source[part])
        yield part, (keys, values)


def _turned(k: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rope(k.index_select(1, slots).float(), cos, sin)


def _squares(offset: Tensor) -> Tensor:
    """Sums of squares of keys and of values, [2]."""
    return offset.square().flatten(1).sum(dim=1)
