"""How much of a device's memory the KV cache may take: found out by a trial run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# What a captured graph and the allocator's rounding take beyond what the trial run shows.
_RESERVE_BYTES = 512 << 20


class DeviceMemory(Protocol):
    """The counters of one device."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What no process has taken."""
        ...

    def allocated_bytes(self) -> int:
        """What this process's tensors hold."""
        ...

    def peak_bytes(self) -> int:
        """The most they have held since the last reset."""
        ...

    def reset_peak(self) -> None: ...


class CudaMemory:
    """Counters of a CUDA device, as torch keeps them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def kv_memory_bytes(memory: DeviceMemory, share: float, trial: Callable[[], None]) -> int:
    """Memory left for the KV cache beside weights, activations and other processes.

    Args:
        share: of the device's whole memory that this process may take, 0 to 1.
        trial: runs the largest step that there will be, on a cache of its own which it frees.

    Returns:
        Bytes; may be negative when the share does not even hold the weights.
    """
    memory.reset_peak()
    before = memory.allocated_bytes()
    trial()
    activations = memory.peak_bytes() - before
    # What other processes hold, and what CUDA itself does, is gone already.
    unavailable = memory.total_bytes() - int(memory.total_bytes() * share)
    return memory.free_bytes() - unavailable - activations - _RESERVE_BYTES
