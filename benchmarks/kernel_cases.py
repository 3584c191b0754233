"""Inputs for every kernel, each with an independent reference in fp32.

A case is values only; `evaluate` runs it through a set of kernels on a device, and `reference`
works it out directly in fp32. The GPU check compares the two; golden dumps keep both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaykv.kernels.attention import AttentionBackend, AttentionBatch
from relaykv.kernels.kernel_set import KernelSet

BLOCK_SIZE = 16
_OFFSET_SCALE = 0.8
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of one kernel.

    Floating-point inputs that are "wide" stay fp32; the others take the type that is tested.
    """

    name: str
    kind: str  # names a pair of functions in this file
    inputs: dict[str, Tensor]  # on the CPU; floats are fp32 and fit 16 bits without rounding
    wide: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()  # what `kind` says


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """What a case is run through."""

    name: str
    kernels: KernelSet
    # Query heads, key heads, head size, type and device -> attention.
    attention: Callable[[int, int, int, torch.dtype, torch.device], AttentionBackend[Any, Any]]


def evaluate(
    case: KernelCase, backend: KernelBackend, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The outputs as the backend computes them, on the CPU.

    Memory that the kernels allocate starts as NaN, so an element that is not written shows.
    """
    inputs = _on_device(case, dtype, device)
    with poisoned_memory():
        outputs = _KINDS[case.kind].run(inputs, case.numbers, backend)
    return {name: value.cpu() for name, value in outputs.items()}


def reference(case: KernelCase, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The outputs in fp32, of the inputs as `dtype` holds them, on the CPU."""
    inputs = {
        name: value.float() if value.is_floating_point() else value
        for name, value in _on_device(case, dtype, device).items()
    }
    outputs = _KINDS[case.kind].refer(inputs, case.numbers)
    return {name: value.cpu() for name, value in outputs.items()}


def bounds(case: KernelCase) -> Mapping[str, float]:
    """How far each output may lie from the reference, in units of the tested type's spacing.

    The spacing is that at the largest reference value of the same vector (the last axis; a
    whole output of one axis), so a correctly rounded result is half a unit off at most. 0: bit
    for bit what the inputs hold.
    """
    return _KINDS[case.kind].bounds


def errors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """The largest error of each output in those units; infinite where NaN stands or is missing."""
    result = {}
    for name, value in wanted.items():
        defined = ~value.isnan()  # memory that nobody was to touch may hold NaN, and keeps it
        difference = (found[name].float() - value.float())[defined].abs()
        size = value.float().nan_to_num().abs()
        unit = (size.amax(-1, keepdim=True) if size.ndim > 1 else size.max()).clamp(min=1e-30)
        unit = (unit * torch.finfo(dtype).eps).expand_as(size)[defined]
        largest = (difference / unit).max().item() if bool(defined.any()) else 0.0
        same = bool((found[name].isnan() == ~defined).all())
        result[name] = largest if same else math.inf
    return result


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills what torch allocates without a value with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with catch_warnings():
        simplefilter("ignore")  # operations without a deterministic version run as always
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def attention_batch(case: KernelCase) -> AttentionBatch:
    """The host's side of an attention case."""
    arrays = {
        name: case.inputs[name].numpy().astype(np.int64)
        for name in ("row_indptr", "row_positions", "block_indptr", "block_ids")
    }
    num_decodes, num_dense = case.numbers
    counts = tuple(bool(c) for c in case.inputs["counts"].tolist())
    return AttentionBatch(
        **arrays, counts_influence=counts, num_decodes=num_decodes, num_dense=num_dense
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    run: Callable[[dict[str, Tensor], tuple[int, ...], KernelBackend], dict[str, Tensor]]
    refer: Callable[[dict[str, Tensor], tuple[int, ...]], dict[str, Tensor]]
    bounds: Mapping[str, float]


def _on_device(case: KernelCase, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    moved = {}
    for name, value in case.inputs.items():
        narrow = value.is_floating_point() and name not in case.wide
        moved[name] = value.to(device, dtype if narrow else value.dtype, copy=True)
    return moved


def _run_attention(
    x: dict[str, Tensor], numbers: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    host = {name: value.cpu() for name, value in x.items()}
    batch = attention_batch(KernelCase("", "attention", host, numbers=numbers))
    q, k_cache = x["q"], x["k_cache"]
    attention = backend.attention(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype, q.device)
    layout = attention.layout(batch)
    tensors = [torch.from_numpy(array).to(q.device) for array in layout.arrays]
    plan = attention.prepare(layout, tensors)
    received = torch.zeros(k_cache.shape[0], device=q.device)
    out = attention.run(plan, q, k_cache, x["v_cache"], received)
    return {"out": out, "received": received}


def _refer_attention(x: dict[str, Tensor], numbers: tuple[int, ...]) -> dict[str, Tensor]:
    num_decodes = numbers[0]
    q, k_cache, v_cache = x["q"], x["k_cache"], x["v_cache"]
    gqa = q.shape[1] // k_cache.shape[1]
    out, received = torch.empty_like(q), torch.zeros(k_cache.shape[0], device=q.device)
    rows, blocks = x["row_indptr"].tolist(), x["block_indptr"].tolist()
    offsets = torch.arange(BLOCK_SIZE, device=q.device)
    for request in range(len(rows) - 1):
        start, stop = rows[request : request + 2]
        ids = x["block_ids"][blocks[request] : blocks[request + 1]].long()
        slots = (ids[:, None] * BLOCK_SIZE + offsets).flatten()
        positions = x["row_positions"][start:stop]
        slots = slots[: int(positions.max()) + 1] if stop > start else slots[:0]
        keys = k_cache[slots].repeat_interleave(gqa, dim=1)  # [keys, heads, head dim]
        values = v_cache[slots].repeat_interleave(gqa, dim=1)
        scores = torch.einsum("nhd,khd->hnk", q[start:stop], keys) / math.sqrt(q.shape[2])
        unseen = torch.arange(len(slots), device=q.device) > positions[:, None]
        probabilities = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
        out[start:stop] = torch.einsum("hnk,khd->nhd", probabilities, values)
        if request < num_decodes and bool(x["counts"][request]):
            received.index_add_(0, slots, probabilities.sum(dim=(0, 1)))
    return {"out": out, "received": received}


def _run_shift_copy(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    backend.kernels.shift_copy(**x)
    return {name: x[name] for name in ("k", "v", "hidden", "influence")}


def _refer_shift_copy(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    source, target = x["source"], x["target"]
    k, v, hidden, influence = (x[name].clone() for name in ("k", "v", "hidden", "influence"))
    k[:, target] = _turned(x["k"][:, source], x)
    v[:, target] = x["v"][:, source]
    hidden[target], influence[target] = x["hidden"][source], x["influence"][source]
    return {"k": k, "v": v, "hidden": hidden, "influence": influence}


def _turned(keys: Tensor, x: dict[str, Tensor]) -> Tensor:
    """Keys [layers, n, kv heads, head dim], each turned by the angles of its segment."""
    cos, sin = x["cos"][x["segment"]][:, None], x["sin"][x["segment"]][:, None]
    half = cos.shape[-1]
    first, second = keys[..., :half], keys[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin, keys[..., 2 * half :])
    return torch.cat(turned, dim=-1)


def _run_add_offset(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    backend.kernels.add_offset(**x, scale=_OFFSET_SCALE)
    return {"k": x["k"], "v": x["v"]}


def _refer_add_offset(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    k, v, target = x["k"].clone(), x["v"].clone(), x["target"]
    chosen = _OFFSET_SCALE * x["offsets"][x["index"][x["segment"]]]  # [n, 2, layers, ...]
    k[:, target] += _turned(chosen[:, 0].transpose(0, 1), x)
    v[:, target] += chosen[:, 1].transpose(0, 1)
    return {"k": k, "v": v}


def _run_anchors(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    kernels = backend.kernels
    squares = kernels.anchor_distance(x["v"], x["target"], x["anchors"])
    places = ("k", "v", "anchors", "weights", "target", "segment", "cos", "sin")
    kernels.add_anchored(*(x[name] for name in places))
    return {"distance": squares.nan_to_num(posinf=0.0), "k": x["k"], "v": x["v"]}


def _refer_anchors(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    k, v, target, anchors = x["k"].clone(), x["v"].clone(), x["target"], x["anchors"]
    is_there = anchors >= 0
    slots = anchors.clamp_min(0)
    squares = (x["v"][:, target, None] - x["v"][:, slots]).square().sum(dim=(0, 3, 4))
    weights = (x["weights"] * is_there)[None, :, :, None, None]  # [1, n, anchors, 1, 1]
    k[:, target] += _turned((weights * x["k"][:, slots]).sum(dim=2), x)
    v[:, target] += (weights * x["v"][:, slots]).sum(dim=2)
    return {"distance": squares * is_there, "k": k, "v": v}


def _run_deviation(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    fresh = x["qkv"][:, -x["cache"].shape[1] :]  # values of a fused projection: not contiguous
    arguments = (fresh, x["cache"], x["slots"])
    return {
        "cosine": backend.kernels.cosine_deviation(*arguments),
        "squared": backend.kernels.squared_deviation(*arguments),
    }


def _refer_deviation(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    relayed = x["cache"][x["slots"]]
    fresh = x["qkv"][:, -relayed.shape[1] :]
    cosine = F.cosine_similarity(fresh, relayed, dim=-1)
    return {
        "cosine": (1 - cosine).mean(dim=1),
        "squared": (fresh - relayed).pow(2).sum(dim=(1, 2)),
    }


def _run_store_kv(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    num_kv_heads = x["k_cache"].shape[1]
    k, v = x["qkv"][:, -2 * num_kv_heads : -num_kv_heads], x["qkv"][:, -num_kv_heads:]
    backend.kernels.store_kv(x["k_cache"], x["v_cache"], x["slots"], k, v)
    return {"k_cache": x["k_cache"], "v_cache": x["v_cache"]}


def _refer_store_kv(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    num_kv_heads = x["k_cache"].shape[1]
    x["k_cache"][x["slots"]] = x["qkv"][:, -2 * num_kv_heads : -num_kv_heads]
    x["v_cache"][x["slots"]] = x["qkv"][:, -num_kv_heads:]
    return {"k_cache": x["k_cache"], "v_cache": x["v_cache"]}


def _run_pointwise(
    x: dict[str, Tensor], _: tuple[int, ...], backend: KernelBackend
) -> dict[str, Tensor]:
    kernels = backend.kernels
    normed = kernels.rms_norm(x["x"].clone(), x["weight"], 1e-5)
    added, total = kernels.add_rms_norm(x["x"].clone(), x["residual"].clone(), x["weight"], 1e-5)
    heads = x["x"].view(x["x"].shape[0], -1, 2 * x["cos"].shape[1])
    return {
        "rms_norm": normed,
        "add_rms_norm": added,
        "sum": total,
        "head_norm": kernels.rms_norm(heads[:, 1:], x["head_weight"], 1e-5),  # not contiguous
        "silu_and_mul": kernels.silu_and_mul(x["x"]),
        "rope": kernels.apply_rope(heads, x["cos"], x["sin"]),
    }


def _refer_pointwise(x: dict[str, Tensor], _: tuple[int, ...]) -> dict[str, Tensor]:
    def norm(value: Tensor, weight: Tensor) -> Tensor:
        mean_square = value.pow(2).mean(dim=-1, keepdim=True)
        return value / (mean_square + 1e-5).sqrt() * weight

    half = x["x"].shape[1] // 2
    gate, up = x["x"][:, :half], x["x"][:, half:]
    heads = x["x"].view(x["x"].shape[0], -1, 2 * x["cos"].shape[1])
    first, second = heads.chunk(2, dim=-1)
    cos, sin = x["cos"][:, None], x["sin"][:, None]
    total = x["x"] + x["residual"]
    return {
        "rms_norm": norm(x["x"], x["weight"]),
        "add_rms_norm": norm(total, x["weight"]),
        "sum": total,
        "head_norm": norm(heads[:, 1:], x["head_weight"]),
        "silu_and_mul": gate / (1 + (-gate).exp()) * up,
        "rope": torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1),
    }


_KINDS: Mapping[str, _Kind] = {
    # Probabilities are rounded to 16 bits before they meet the values; plain torch rounds scores.
    "attention": _Kind(_run_attention, _refer_attention, {"out": 3.0, "received": 0.5}),
    "shift_copy": _Kind(
        _run_shift_copy,
        _refer_shift_copy,
        {"k": 0.6, "v": 0.0, "hidden": 0.0, "influence": 0.0},
    ),
    "add_offset": _Kind(_run_add_offset, _refer_add_offset, {"k": 0.6, "v": 0.6}),
    "anchors": _Kind(_run_anchors, _refer_anchors, {"distance": 0.01, "k": 0.6, "v": 0.6}),
    # fp32 sums over exact products, in another order.
    "deviation": _Kind(_run_deviation, _refer_deviation, {"cosine": 0.01, "squared": 0.01}),
    "store_kv": _Kind(_run_store_kv, _refer_store_kv, {"k_cache": 0.0, "v_cache": 0.0}),
    # Ours rounds before the weight and after it, FlashInfer's once; a sum is rounded before.
    "pointwise": _Kind(
        _run_pointwise,
        _refer_pointwise,
        {
            "rms_norm": 1.5,
            "add_rms_norm": 2.0,
            "sum": 0.6,
            "head_norm": 1.5,
            "silu_and_mul": 1.5,
            "rope": 0.6,
        },
    ),
}
