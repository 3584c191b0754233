"""Mean offsets of recurring hand-offs, on the device: learned from observations, added to relays.

Which mean belongs to which hand-off, and whether it may be used, the host knows
(`handoff_slots.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.batch import HoldoutError, Lesson, Observation
from relaykv.engine.config import ModelConfig
from relaykv.engine.kv_cache import KVCache
from relaykv.kernels.readback import start_readback
from relaykv.kernels.segment_offset import segment_offset
from relaykv.kernels.staging import Staging

# How much of a mean is added. A token's own offset is only partly the mean one: on hand-offs of six
# pipelines, each left out of its mean, 0.7 to 0.85 gave the least divergence (RESULTS.md).
OFFSET_SCALE = 0.8


@dataclass(frozen=True, slots=True)
class _Errors:
    """Squared errors of every lesson, on their way to the host."""

    num_lessons: tuple[int, ...]  # by observation
    read: Callable[[], Tensor]  # [lessons, before and after, keys and values]

    def result(self) -> tuple[tuple[HoldoutError, ...], ...]:
        rows = iter(self.read().tolist())
        return tuple(tuple(_share(*next(rows)) for _ in range(count)) for count in self.num_lessons)


class OffsetMemory:
    """Means by number. With fp32 a mean does not lose what the thousandth observation adds.

    Attributes:
        means: fp32 [capacity, 2, L, Hkv, D], of keys in a segment that starts at position 0, and
            of values.
    """

    def __init__(self, model: ModelConfig, capacity: int, device: torch.device) -> None:
        shape = (capacity, 2, model.num_layers, model.num_kv_heads, model.head_dim)
        self.means = torch.zeros(shape, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_per_mean(model: ModelConfig) -> int:
        row = model.num_kv_heads * model.head_dim
        return 2 * model.num_layers * row * torch.float32.itemsize

    def observe(
        self,
        cache: KVCache,
        observations: Sequence[Observation],
        inv_freq: NDArray[np.float64],
        staging: Staging,
    ) -> _Errors:
        """Tests every mean on an observation, then takes it in (Welford). Does not wait.

        Args:
            cache: holds both the recordings' KV and the computed KV.
            observations: in the order in which they count.
            inv_freq: the model's rotary frequencies, [rotary_dim / 2].
        """
        arrays: list[NDArray[Any]] = []
        for observation in observations:
            copy = observation.copy
            angles = -np.array([[copy.source_start], [copy.start]]) * inv_freq
            arrays += [cache.flat_slots(copy.source_block_ids, copy.source_start, copy.num_tokens)]
            arrays += [cache.flat_slots(copy.block_ids, copy.start, copy.num_tokens)]
            arrays += [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
        brought = iter(staging.upload(arrays))
        errors: list[Tensor] = []
        for observation in observations:
            source, target, cos, sin = (next(brought) for _ in range(4))
            found = segment_offset(cache.k, cache.v, source, target, cos, sin)
            for lesson in observation.lessons:
                mean = self.means[lesson.offset_index]
                errors.append(
                    torch.stack((found.energy, found.energy_without(OFFSET_SCALE * mean)))
                )
                self._learn(lesson, found.mean)
        counts = tuple(len(observation.lessons) for observation in observations)
        return _Errors(counts, start_readback(torch.stack(errors)))

    def _learn(self, lesson: Lesson, offset: Tensor) -> None:
        mean = self.means[lesson.offset_index]
        if lesson.num_observations == 0:  # another hand-off's mean may still be there
            mean.copy_(offset)
        else:
            mean.lerp_(offset, 1 / (lesson.num_observations + 1))


def _share(before: Sequence[float], after: Sequence[float]) -> HoldoutError:
    """What is left; all of it where there was nothing to correct."""
    keys, values = (a / b if b else 1.0 for b, a in zip(before, after, strict=True))
    return HoldoutError(keys, values)
