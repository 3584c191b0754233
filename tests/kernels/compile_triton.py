"""Compiles what the Triton wrappers launch for NVIDIA devices, none of which need be there.

Run as a program with compute capabilities (80 90) it prints JSON lines, one `Compiled` each. It
wants TRITON_ALWAYS_COMPILE=1 and TRITON_DUMP_PTXAS_LOG=1, to read registers off the assembler's
log. The wrappers are called with tensors that have no memory and their launches intercepted, so the
types, constants and options are their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relaykv.kernels import (
    add_anchored_triton,
    add_offset_triton,
    anchor_distance_triton,
    deviation_triton,
    influence_triton,
    shift_copy_triton,
    store_kv_triton,
)

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for: a model's attention and the cache's block size."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    hidden_size: int
    block_size: int = 16


SHAPES = {
    "llama-8b": Shape(32, 32, 8, 128, 128, 4096),
    "odd": Shape(24, 21, 3, 96, 32, 576),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shape: str
    dtype: str
    capability: int
    shared_bytes: int
    num_registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a wrapper: its kernel and all that it was called with."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compile(self, capability: int) -> tuple[int, str]:
        """Bytes of shared memory, and what the assembler said."""
        names = self.kernel.arg_names
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for index, (name, value) in enumerate(zip(names, self.args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                divisible = value.data_ptr() % 16 == 0
            elif value == 1:  # Triton makes a constant of it
                signature[name], constants[name] = "constexpr", 1
                continue
            else:
                is_int = isinstance(value, int)
                signature[name] = ("i32" if value < 2**31 else "i64") if is_int else "fp32"
                divisible = is_int and value % 16 == 0
            if divisible:
                attributes[(index,)] = [["tt.divisibility", 16]]
        for name in names[len(self.args) :]:
            signature[name], constants[name] = "constexpr", self.kwargs[name]
        options = {name: value for name, value in self.kwargs.items() if name not in names}
        source = ASTSource(self.kernel, signature, constants, attributes)
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
        assert compiled.asm["cubin"]
        return compiled.metadata.shared, log.getvalue()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Kernels that note their launches instead of running."""
    launches: list[Launch] = []

    def record(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
            assert all(grid)
            assert not warmup
            launches.append(Launch(kernel, args, kwargs))

        return run

    kernels = [
        store_kv_triton._store_kv,
        deviation_triton._deviation,
        shift_copy_triton._shift_copy_kv,
        shift_copy_triton._copy_hidden,
        add_offset_triton._add_offset,
        anchor_distance_triton._anchor_distance,
        add_anchored_triton._add_anchored_keys,
        add_anchored_triton._add_anchored_plain,
        influence_triton._add_influence,
    ]
    for kernel in kernels:
        kernel.run = record(kernel)
    yield launches
    for kernel in kernels:
        del kernel.run


def call_wrappers(shape: Shape, dtype: torch.dtype) -> None:
    """Calls each wrapper with tensors that have shapes and no memory, the cache a large one."""
    num_slots = 3 * 2**20  # one layer's keys have more than 2^31 elements
    row = (shape.num_kv_heads, shape.head_dim)
    with torch.device("meta"):
        cache = torch.empty((shape.num_layers, num_slots, *row), dtype=dtype)
        num_rotated = shape.num_heads + shape.num_kv_heads
        fused = torch.empty((5, num_rotated + shape.num_kv_heads, shape.head_dim), dtype=dtype)
        q, value = fused[:, : shape.num_heads], fused[:, num_rotated:]
        key = fused[:, shape.num_heads : num_rotated]
        slots = torch.empty(5, dtype=torch.int64)
        hidden = torch.empty((num_slots, shape.hidden_size), dtype=dtype)
        received = torch.empty(num_slots)
        angles = torch.empty((2, shape.rotary_dim // 2))
        lse = torch.empty((5, shape.num_heads))
        counts = torch.empty(5, dtype=torch.int32)
        indptr = torch.empty(6, dtype=torch.int32)
        anchors = torch.empty((5, 20), dtype=torch.int64)
        weights = torch.empty((5, 20))
        offsets = torch.empty((9, 2, shape.num_layers, *row))
    store_kv_triton.store_kv_triton(cache[0], cache[0], slots, key, value)
    deviation_triton.cosine_deviation_triton(value, cache[0], slots)
    deviation_triton.squared_deviation_triton(value, cache[0], slots)
    shift_copy_triton.shift_copy_triton(
        cache, cache, hidden, received, slots, slots, slots, angles, angles
    )
    add_offset_triton.add_offset_triton(
        cache, cache, offsets, slots, slots, slots, angles, angles, 0.5
    )
    anchor_distance_triton.anchor_distance_triton(cache, slots, anchors)
    add_anchored_triton.add_anchored_triton(
        cache, cache, anchors, weights, slots, slots, angles, angles
    )
    influence_triton.add_influence_triton(
        received, q, cache[0], lse, counts, indptr, counts, counts, shape.block_size, 0.1
    )


def compile_all(capabilities: list[int]) -> Iterator[Compiled]:
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float16):
            with recorded() as launches:
                call_wrappers(shape, dtype)
            for launch in launches:
                for capability in capabilities:
                    shared, log = launch.compile(capability)
                    registers = re.findall(r"Used (\d+) registers", log)
                    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
                    yield Compiled(
                        launch.kernel.__name__,
                        name,
                        str(dtype),
                        capability,
                        shared,
                        int(registers[0]),
                        sum(map(int, spills)),
                    )


if __name__ == "__main__":
    for compiled in compile_all([int(capability) for capability in sys.argv[1:]]):
        print(json.dumps(asdict(compiled)), flush=True)
