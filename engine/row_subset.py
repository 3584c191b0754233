"""Some of a batch's rows, and how they come to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostArray = NDArray[Any]
# Brings arrays to the device, all in one copy; see `Staging.upload`.
Upload = Callable[[Sequence[HostArray]], Sequence[Tensor]]


def share_memory(arrays: Sequence[HostArray]) -> list[Tensor]:
    """The `Upload` of a CPU, where there is nothing to bring anywhere."""
    return [torch.from_numpy(array) for array in arrays]


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Rows of n, rising. All of them need no index: nothing is brought, gathered or put back."""

    indices: tuple[int, ...]
    num_rows: int

    @property
    def is_all(self) -> bool:
        return len(self.indices) == self.num_rows

    @property
    def arrays(self) -> tuple[HostArray, ...]:
        """What has to be brought to the device for `receive`."""
        return () if self.is_all else (np.array(self.indices, dtype=np.int64),)

    def receive(self, brought: Iterator[Tensor]) -> Tensor | None:
        """Takes those arrays off what was brought, for `take` and `put`."""
        return None if self.is_all else next(brought)

    @staticmethod
    def take(values: Tensor, at: Tensor | None) -> Tensor:
        """[n, ...] -> [rows of the subset, ...]"""
        return values if at is None else values.index_select(0, at)

    @staticmethod
    def put(values: Tensor, at: Tensor | None, changed: Tensor) -> Tensor:
        """New values [n, ...], those of the subset being `changed`."""
        return changed if at is None else values.index_copy(0, at, changed)
