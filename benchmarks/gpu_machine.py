"""The machine that the GPU check runs on: its device, kernels, clock and published peaks."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from kernel_cases import KernelBackend
from phase_costs import Accelerator, accelerators

from relaykv.engine.sampler import Sampler
from relaykv.kernels.attention import AttentionBackend
from relaykv.kernels.attention_torch import TorchAttention
from relaykv.kernels.kernel_set import KernelSet, cuda_kernels, torch_kernels
from relaykv.kernels.sampling import cuda_filters
from relaykv.kernels.staging import Staging

_BLOCK_SIZE = 16
_PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "ninja", "numpy")
# Of `Machine.backends`: served first, and decoding on CUDA cores whatever the heads.
SERVED = 0
CUDA_CORE_DECODE = 1
# Of the same name with other peaks: a slower board, or part of one.
_OTHER_PEAKS = frozenset({"PCIe", "NVL", "MIG", "Laptop", "D"})
# More than any L2 cache: a kernel in a model finds its layer's KV in memory, not there.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """A CUDA device, or a CPU that stands in for one in a dry run."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dry(self) -> bool:
        return self.device.type == "cpu"

    def kernels(self) -> KernelSet:
        return torch_kernels() if self.dry else cuda_kernels()

    def backends(self) -> list[KernelBackend]:
        """Kernels with each way to attend, in the order that the constants above name."""
        kernels = self.kernels()
        if self.dry:
            return [KernelBackend("torch", kernels, torch_attention)] * 2
        flashinfer = partial(flashinfer_attention, kernels)
        return [
            KernelBackend("flashinfer", kernels, partial(flashinfer, {})),
            KernelBackend(
                "CUDA-core decode", kernels, partial(flashinfer, {"tensor_core_decode": False})
            ),
            KernelBackend("stock module", kernels, partial(flashinfer, {"stock_module": True})),
            KernelBackend("deterministic", kernels, partial(flashinfer, {"deterministic": True})),
        ]

    def sampler(self) -> Sampler:
        """As a model runner of this device has it."""
        if self.dry:
            return Sampler()
        return Sampler(None, Staging(self.device).upload, cuda_filters())

    def wait(self) -> None:
        """Until the device has done all its work."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def check_alive(self) -> None:
        """Raises when the device can no longer be used, as after an illegal access."""
        self.wait()
        torch.zeros(1, device=self.device).sum().item()

    def median_s(self, function: Callable[[], object], repeats: int = 5) -> float:
        """Seconds of device time of one call, after two to warm up, with a cold cache."""
        for _ in range(2):
            function()
        return statistics.median(self._time_s(function) for _ in range(repeats))

    def _time_s(self, function: Callable[[], object]) -> float:
        if self.dry:
            started = time.perf_counter()
            function()
            return time.perf_counter() - started
        # Writing this also keeps the device busy until all of the call has been launched.
        torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device).zero_()
        new_event: Any = torch.cuda.Event
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def description(self) -> Mapping[str, Any]:
        """What a result depends on; plain values for JSON."""
        info: dict[str, Any] = {
            "device": "CPU" if self.dry else torch.cuda.get_device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "commit": commit(),
        }
        if not self.dry:
            properties = torch.cuda.get_device_properties(self.device)
            info |= {
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "cuda_of_torch": torch.version.cuda,
            }
        return info

    def accelerator(self) -> Accelerator:
        """Published peaks where the device is known, else rates that are measured here."""
        name = "" if self.dry else torch.cuda.get_device_name(self.device)
        return known_accelerator(name) or self.measured()

    def measured(self) -> Accelerator:
        """Rates of one large matrix product and of one large copy."""
        size = 256 if self.dry else 8192
        matrix = torch.randn((size, size), dtype=self.dtype, device=self.device)
        product_s = self.median_s(lambda: matrix @ matrix)
        source = torch.zeros(1 << (22 if self.dry else 31), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.median_s(lambda: target.copy_(source))
        return Accelerator("measured here", 2 * size**3 / product_s, 2 * source.numel() / copy_s)

    def memory_bytes(self) -> int:
        """Free memory of the device; a small number in a dry run."""
        if self.dry:
            return 1 << 30
        torch.cuda.empty_cache()  # what torch keeps for itself is free as well
        return torch.cuda.mem_get_info(self.device)[0]


def known_accelerator(device_name: str) -> Accelerator | None:
    """The published peaks of a device as its driver names it; None where they are not known."""
    words = device_name.split()
    if _OTHER_PEAKS.intersection(words):
        return None
    known = accelerators()
    return next((a for a in known if a.name.removeprefix("RTX ").split()[0] in words), None)


def torch_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, _: torch.device
) -> AttentionBackend[Any, Any]:
    return TorchAttention(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE, dtype)


def flashinfer_attention(
    kernels: KernelSet,
    options: dict[str, Any],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend[Any, Any]:
    """Attention through FlashInfer; `options` are those of `FlashInferAttention`."""
    from relaykv.kernels.attention_flashinfer import FlashInferAttention

    return FlashInferAttention(
        num_heads,
        num_kv_heads,
        head_dim,
        _BLOCK_SIZE,
        dtype,
        device,
        add_influence=kernels.add_influence,
        **options,
    )


def commit() -> str:
    """The checkout's commit, with a mark when files differ from it."""
    git = ("git", "-C", str(Path(__file__).parent))
    name = output_of(*git, "rev-parse", "--short", "HEAD")
    if name is None:
        return "unknown"
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if changed else name


def output_of(*command: str) -> str | None:
    """What a program prints; None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
