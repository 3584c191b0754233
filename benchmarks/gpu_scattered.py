"""Section of the GPU check: attention of scattered rows, in two ways, against dense rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_machine import SERVED, Machine
from gpu_report import Recorder, table
from model_shapes import ModelShape

from relaykv.kernels.attention import AttentionBackend, AttentionBatch, IntArray

_BLOCK_SIZE = 16
_MS = 1e3


def measure_scattered(machine: Machine, recorder: Recorder, shapes: list[ModelShape]) -> None:
    """Rows of one relayed prompt: groups under our mask (B), runs (C), and as many dense ones."""
    num_keys, counts = (256, (32,)) if machine.dry else (4096, (256, 1024))
    rows: list[tuple[str, ...]] = [
        ("model", "rows", "of keys", "B ms", "C ms", "dense ms", "C / B", "B / dense")
    ]
    work = [
        (f"{shape.name}: {count} {pattern} rows", (shape, count, pattern))
        for shape in shapes
        for count in counts
        for pattern in ("random", "runs of 8")
    ]
    for shape, count, pattern in recorder.each(work):
        positions = _positions(pattern, count, num_keys)
        dense = np.arange(num_keys - count, num_keys)
        timed = _Attention(machine, shape, num_keys)
        entry: dict[str, Any] = {
            "model": shape.name,
            "rows": count,
            "pattern": pattern,
            "keys": num_keys,
            "groups_ms": timed.median_s("flashinfer", positions, 0) * _MS,
            "runs_ms": timed.median_s("stock module", positions, 0) * _MS,
            "dense_ms": timed.median_s("flashinfer", dense, 1) * _MS,
        }
        recorder.append("attention", entry)
        b, c, d = entry["groups_ms"], entry["runs_ms"], entry["dense_ms"]
        rows.append(
            (
                shape.name,
                f"{count} {pattern}",
                str(num_keys),
                *(f"{value:.3f}" for value in (b, c, d)),
                f"{c / b:.2f}",
                f"{b / d:.2f}",
            )
        )
    recorder.say(table(rows))
    recorder.say("one layer, device time without planning; a dry run has one way only for B and C")


class _Attention:
    """One layer of one request, ready to be timed."""

    def __init__(self, machine: Machine, shape: ModelShape, num_keys: int) -> None:
        config = shape.config
        self._machine = machine
        self._config = config
        self._backends = {backend.name: backend for backend in machine.backends()}
        self._served = machine.backends()[SERVED]
        self._blocks = np.random.default_rng(0).permutation(-(-num_keys // _BLOCK_SIZE))
        slots = len(self._blocks) * _BLOCK_SIZE
        self._k, self._v = (
            torch.randn(
                (slots, config.num_kv_heads, config.head_dim),
                dtype=machine.dtype,
                device=machine.device,
            )
            for _ in range(2)
        )

    def median_s(self, backend: str, positions: IntArray, num_dense: int) -> float:
        config, machine = self._config, self._machine
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        chosen = self._backends.get(backend, self._served)
        attention: AttentionBackend[Any, Any] = chosen.attention(
            *heads, machine.dtype, machine.device
        )
        batch = AttentionBatch(
            row_indptr=np.array([0, len(positions)]),
            row_positions=positions,
            block_indptr=np.array([0, len(self._blocks)]),
            block_ids=self._blocks,
            counts_influence=(False,),
            num_decodes=0,
            num_dense=num_dense,
        )
        layout = attention.layout(batch)
        tensors = [torch.from_numpy(array).to(machine.device) for array in layout.arrays]
        plan = attention.prepare(layout, tensors)
        q = torch.randn(
            (len(positions), config.num_heads, config.head_dim),
            dtype=machine.dtype,
            device=machine.device,
        )
        return machine.median_s(lambda: attention.run(plan, q, self._k, self._v, None))


def _positions(pattern: str, count: int, num_keys: int) -> IntArray:
    """Rising positions of `count` rows among `num_keys`; the last key's is always there."""
    if pattern == "random":
        chosen = np.random.default_rng(1).permutation(num_keys - 1)[: count - 1]
        return np.sort(np.append(chosen, num_keys - 1))
    starts = np.linspace(0, num_keys - 8, count // 8).astype(np.int64)
    return (starts[:, None] + np.arange(8)).ravel()
