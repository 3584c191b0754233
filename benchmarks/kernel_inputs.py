"""Random inputs for the kernel cases, in a size for a GPU and in one for golden files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernel_cases import BLOCK_SIZE, KernelCase
from torch import Tensor

from relaykv.kernels.rope import cos_sin, inverse_frequencies

# What stands behind a request's last key in its last block: finite, and far from any sum.
_BEHIND_THE_END = 1000.0
_SMALLEST = 2.0**-17  # below it fp16 has fewer digits than bfloat16


@dataclass(frozen=True, slots=True)
class CaseSizes:
    """Of all cases; lengths are tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int  # of the cache that a shift copy works on
    num_keys: int  # context of the longest request
    num_rows: int  # of the largest chunk or selection


def large() -> CaseSizes:
    """Heads of Llama-3.1-8B, a context of a few thousand tokens."""
    return CaseSizes(32, 8, 128, 4096, 4, 3000, 700)


def small() -> CaseSizes:
    """Little enough to be kept in a repository, with the head size of both papers' models."""
    return CaseSizes(8, 2, 128, 256, 1, 100, 30)


def tiny() -> CaseSizes:
    """For a dry run."""
    return CaseSizes(4, 2, 16, 64, 2, 100, 40)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A request of an attention case: its rows, and how many keys its blocks hold."""

    positions: Sequence[int]
    num_keys: int
    counts: bool = False


def kernel_cases(sizes: CaseSizes, seed: int) -> list[KernelCase]:
    """One case or more of every kind; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)
    return [
        *_attention_cases(sizes, generator),
        _shift_copy_case(sizes, generator),
        _add_offset_case(sizes, generator),
        _anchors_case(sizes, generator),
        _deviation_case(sizes, generator),
        _store_kv_case(sizes, generator),
        _pointwise_case(sizes, generator),
    ]


def _attention_cases(sizes: CaseSizes, generator: torch.Generator) -> list[KernelCase]:
    num_keys, num_rows = sizes.num_keys, sizes.num_rows
    lengths = (num_keys, BLOCK_SIZE, BLOCK_SIZE + 1, 1)
    decodes = [_Rows([n - 1], n, counts=i != 1) for i, n in enumerate(lengths)]
    dense = [
        _Rows(range(num_keys - num_rows, num_keys), num_keys),
        _Rows(range(BLOCK_SIZE + 1), BLOCK_SIZE + 1),
    ]
    chosen = torch.randperm(num_keys - 1, generator=generator)[: num_rows - 1]
    runs = [p for p in range(num_keys - 8) if p % 32 < 8][:num_rows]
    scattered = [
        _Rows([*sorted(chosen.tolist()), num_keys - 1], num_keys),
        _Rows(runs, num_keys),
        _Rows([3], BLOCK_SIZE),
    ]
    make = _attention_case
    return [
        make("decode attention", sizes, decodes, (4, 0), generator),
        make("dense attention", sizes, dense, (0, 2), generator),
        make("scattered attention", sizes, scattered, (0, 0), generator),
        make("mixed attention", sizes, [*decodes, *dense, *scattered], (4, 2), generator),
    ]


def _attention_case(
    name: str,
    sizes: CaseSizes,
    requests: list[_Rows],
    numbers: tuple[int, int],
    generator: torch.Generator,
) -> KernelCase:
    lengths = [-(-request.num_keys // BLOCK_SIZE) for request in requests]
    num_blocks = 2 * sum(lengths)  # half of them belong to nobody
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int64)
    block_ids, indptr = order[: sum(lengths)].clone(), _indptr(lengths)
    if len(requests) > 2:
        # Two requests begin with the same block, as behind an exact prefix hit.
        block_ids[indptr[1]] = block_ids[indptr[0]]
    shape = (num_blocks * BLOCK_SIZE, sizes.num_kv_heads, sizes.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for request, start, stop in zip(requests, indptr[:-1], indptr[1:], strict=True):
        slots = (block_ids[start:stop, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        for cache in (k_cache, v_cache):
            cache[slots] = _normal((len(slots), *shape[1:]), generator)
            cache[slots[request.num_keys :]] = _BEHIND_THE_END
    for request, start in zip(requests[:2], indptr[:2], strict=False):
        slots = block_ids[start] * BLOCK_SIZE + torch.arange(min(BLOCK_SIZE, request.num_keys))
        k_cache[slots] = _normal((len(slots), *shape[1:]), generator)
        v_cache[slots] = _normal((len(slots), *shape[1:]), generator)
    positions = [p for request in requests for p in request.positions]
    return KernelCase(
        name,
        "attention",
        {
            "q": _normal((len(positions), sizes.num_heads, sizes.head_dim), generator),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "row_indptr": _indptr([len(request.positions) for request in requests]),
            "row_positions": torch.tensor(positions),
            "block_indptr": indptr,
            "block_ids": block_ids,
            "counts": torch.tensor([request.counts for request in requests]),
        },
        numbers=numbers,
    )


def _shift_copy_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    count = sizes.num_rows
    num_slots = 2 * count + BLOCK_SIZE
    slots = torch.randperm(num_slots, generator=generator)
    shape = (sizes.num_layers, num_slots, sizes.num_kv_heads, sizes.head_dim)
    # Llama's frequencies; one segment moves on by more than a thousand tokens, one back.
    cos, sin = cos_sin(inverse_frequencies(5e5, sizes.head_dim), torch.tensor([1543, -77]))
    return KernelCase(
        "shift copy",
        "shift_copy",
        {
            "k": _normal(shape, generator),
            "v": _normal(shape, generator),
            "hidden": _normal((num_slots, sizes.hidden_size), generator),
            "influence": torch.rand(num_slots, generator=generator),
            "source": slots[:count],
            "target": slots[count : 2 * count],
            "segment": (torch.arange(count) >= count // 3).long(),
            "cos": cos,
            "sin": sin,
        },
        wide=("influence", "cos", "sin"),
    )


def _add_offset_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    count = sizes.num_rows // 2
    row = (sizes.num_kv_heads, sizes.head_dim)
    cos, sin = cos_sin(inverse_frequencies(5e5, sizes.head_dim), torch.tensor([1543, 77]))
    return KernelCase(
        "add offset",
        "add_offset",
        {
            "k": _normal((sizes.num_layers, 2 * count, *row), generator),
            "v": _normal((sizes.num_layers, 2 * count, *row), generator),
            "offsets": torch.randn((5, 2, sizes.num_layers, *row), generator=generator),
            "index": torch.tensor([4, 1]),
            "target": torch.randperm(2 * count, generator=generator)[:count],
            "segment": (torch.arange(count) >= count // 3).long(),
            "cos": cos,
            "sin": sin,
        },
        wide=("offsets", "cos", "sin"),
    )


def _anchors_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    count, num_anchors = sizes.num_rows // 2, 3
    num_slots = (num_anchors + 1) * count
    shape = (sizes.num_layers, num_slots, sizes.num_kv_heads, sizes.head_dim)
    slots = torch.randperm(num_slots, generator=generator)
    anchors = slots[count:].view(count, num_anchors).clone()
    anchors[: count // 3, 1] = -1  # the first segment has fewer
    weights = torch.rand((count, num_anchors), generator=generator)
    cos, sin = cos_sin(inverse_frequencies(5e5, sizes.head_dim), torch.tensor([1543, 77]))
    return KernelCase(
        "anchors",
        "anchors",
        {
            "k": _normal(shape, generator),
            "v": _normal(shape, generator),
            "anchors": anchors,
            "weights": weights,
            "target": slots[:count],
            "segment": (torch.arange(count) >= count // 3).long(),
            "cos": cos,
            "sin": sin,
        },
        wide=("weights", "cos", "sin"),
    )


def _deviation_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    count, heads = sizes.num_rows, sizes.num_heads + 2 * sizes.num_kv_heads
    num_slots = 2 * count
    qkv = _normal((count, heads, sizes.head_dim), generator)
    cache = _normal((num_slots, sizes.num_kv_heads, sizes.head_dim), generator)
    slots = torch.randperm(num_slots, generator=generator)[:count]
    # As after a relay: fresh values close to the relayed ones, one in eight not so close.
    noise = torch.where(torch.arange(count) % 8 == 0, 0.5, 0.05)[:, None, None]
    values = qkv[:, -sizes.num_kv_heads :]
    qkv[:, -sizes.num_kv_heads :] = _fit(cache[slots] + noise * values)
    return KernelCase("deviation", "deviation", {"qkv": qkv, "cache": cache, "slots": slots})


def _store_kv_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    count, heads = sizes.num_rows, sizes.num_heads + 2 * sizes.num_kv_heads
    shape = (2 * count, sizes.num_kv_heads, sizes.head_dim)
    return KernelCase(
        "store KV",
        "store_kv",
        {
            "k_cache": _normal(shape, generator),
            "v_cache": _normal(shape, generator),
            "slots": torch.randperm(2 * count, generator=generator)[:count],
            "qkv": _normal((count, heads, sizes.head_dim), generator),
        },
    )


def _pointwise_case(sizes: CaseSizes, generator: torch.Generator) -> KernelCase:
    shape = (sizes.num_rows, sizes.hidden_size)
    positions = torch.arange(sizes.num_rows) * 17
    cos, sin = cos_sin(inverse_frequencies(5e5, sizes.head_dim), positions)
    return KernelCase(
        "norms, activation, rope",
        "pointwise",
        {
            "x": _normal(shape, generator),
            "residual": _normal(shape, generator),
            "weight": _fit(1 + 0.3 * _normal((sizes.hidden_size,), generator)),
            "head_weight": _fit(1 + 0.3 * _normal((sizes.head_dim,), generator)),
            "cos": cos,
            "sin": sin,
        },
        wide=("cos", "sin"),
    )


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _fit(torch.randn(shape, generator=generator))


def _fit(values: Tensor) -> Tensor:
    """fp32 values that bfloat16 and float16 hold without rounding."""
    rounded = values.bfloat16().float()
    return torch.where(rounded.abs() < _SMALLEST, 0.0, rounded)


def _indptr(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
