"""Brings the small integer arrays of a step to the device, all in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read index arrays in wide words
_MIN_BYTES = 1 << 16


class Staging:
    """Packs host arrays into a pinned buffer and copies it once, without waiting.

    The copy of an upload may still be pending when the next one is packed, so several pinned
    buffers take turns, each with an event that says when it may be written again. On a CPU
    there is nothing to bring anywhere: the tensors share the arrays' memory.
    """

    def __init__(
        self, device: torch.device, num_buffers: int = 4, packed: bool | None = None
    ) -> None:
        """
        Args:
            num_buffers: uploads that may be pending before one has to wait.
            packed: None packs on accelerators only; True on a CPU too, for tests.
        """
        self._device = device
        self._packed = device.type != "cpu" if packed is None else packed
        self._buffers: list[Tensor] = [self._pinned(_MIN_BYTES) for _ in range(num_buffers)]
        self._events: list[Any] = [None] * num_buffers
        self._next = 0
        self.num_copies = 0

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Tensors on the device with the arrays' values, dtypes and shapes, in their order.

        Args:
            arrays: contiguous; they must not be written afterwards.
        """
        if not self._packed:
            return [torch.from_numpy(array) for array in arrays]
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return [self._empty(array) for array in arrays]
        on_device = self._copy(arrays, starts, size)
        return [
            on_device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            if array.nbytes
            else self._empty(array)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _copy(self, arrays: Sequence[NDArray[Any]], starts: list[int], size: int) -> Tensor:
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()  # long past, unless uploads outrun the device by a whole round
        if self._buffers[index].numel() < size:
            self._buffers[index] = self._pinned(2 * size)
        buffer = self._buffers[index]
        host = buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        on_device.copy_(buffer[:size], non_blocking=True)
        self.num_copies += 1
        if self._device.type == "cuda":
            self._events[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._events[index].record()
        return on_device

    def _pinned(self, num_bytes: int) -> Tensor:
        if not self._packed:
            return torch.empty(0, dtype=torch.uint8)
        pin = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)

    def _empty(self, array: NDArray[Any]) -> Tensor:
        return torch.empty(array.shape, dtype=_torch_dtype(array), device=self._device)


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
