"""The GPU check's cases: every backend that can run here meets them, and every mistake fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gpu_machine import flashinfer_attention, torch_attention
from kernel_cases import (
    KernelBackend,
    KernelCase,
    bounds,
    errors,
    evaluate,
    poisoned_memory,
    reference,
)
from kernel_inputs import kernel_cases, small, tiny
from torch import Tensor

from relaykv.kernels.attention import AttentionBackend, AttentionBatch
from relaykv.kernels.kernel_set import KernelSet, torch_kernels
from relaykv.kernels.shift_copy import shift_copy

CPU = torch.device("cpu")
TORCH = KernelBackend("torch", torch_kernels(), torch_attention)
ATTENTION = [case for case in kernel_cases(tiny(), 5) if case.kind == "attention"]


def beyond(case: KernelCase, backend: KernelBackend, dtype: torch.dtype) -> set[str]:
    """Outputs that lie outside of their bounds."""
    found = evaluate(case, backend, dtype, CPU)
    units = errors(found, reference(case, dtype, CPU), dtype)
    return {name for name, bound in bounds(case).items() if not units[name] <= bound}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [tiny(), small()])
def test_plain_torch_meets_every_case(sizes: Any, dtype: torch.dtype) -> None:
    for case in kernel_cases(sizes, 11):
        assert beyond(case, TORCH, dtype) == set(), case.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"stock_module": True}, {"deterministic": True}, {"tensor_core_decode": False}],
    ids=["served", "stock module", "deterministic", "CUDA-core decode"],
)
@pytest.mark.usefixtures("flashinfer_installed")
def test_flashinfers_wrappers_over_a_stand_in_meet_every_case_of_attention(
    options: dict[str, bool], dtype: torch.dtype
) -> None:
    from flashinfer_stand_in import flashinfer_stand_in

    small_workspace = {**options, "workspace_bytes": 1 << 20}
    attention = partial(flashinfer_attention, torch_kernels(), small_workspace)
    backend = KernelBackend("stand-in", torch_kernels(), attention)
    with flashinfer_stand_in():
        for case in kernel_cases(small(), 11):
            if case.kind == "attention":
                assert beyond(case, backend, dtype) == set(), case.name


class _OtherRows:
    """Attention that is told something else than the batch: for planted mistakes."""

    def __init__(
        self, inner: AttentionBackend[Any, Any], change: Callable[[AttentionBatch], AttentionBatch]
    ) -> None:
        self._inner = inner
        self._change = change

    def layout(self, batch: AttentionBatch) -> Any:
        return self._inner.layout(self._change(batch))

    def prepare(self, layout: Any, tensors: Any) -> Any:
        return self._inner.prepare(layout, tensors)

    def run(self, plan: Any, q: Tensor, k: Tensor, v: Tensor, received: Tensor | None) -> Tensor:
        return self._inner.run(plan, q, k, v, received)


def mistaken(change: Callable[[AttentionBatch], AttentionBatch]) -> KernelBackend:
    def attention(*shape: Any) -> AttentionBackend[Any, Any]:
        return _OtherRows(torch_attention(*shape), change)

    return KernelBackend("mistaken", torch_kernels(), attention)


def as_last_rows(batch: AttentionBatch) -> AttentionBatch:
    """The bottom-right mask: a request's n rows are taken for its last n."""
    positions = batch.row_positions.copy()
    for start, stop in zip(batch.row_indptr[:-1], batch.row_indptr[1:], strict=True):
        last = positions[stop - 1]
        positions[start:stop] = np.arange(last - (stop - start) + 1, last + 1)
    return replace(batch, row_positions=positions)


def one_key_less(batch: AttentionBatch) -> AttentionBatch:
    return replace(batch, row_positions=np.maximum(batch.row_positions - 1, 0))


def one_key_more(batch: AttentionBatch) -> AttentionBatch:
    positions = batch.row_positions.copy()
    room = positions % 16 < 15  # further on there may be no block
    return replace(batch, row_positions=positions + room)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scattered attention", as_last_rows),
        ("mixed attention", as_last_rows),
        ("decode attention", one_key_less),
        ("decode attention", one_key_more),
        ("dense attention", one_key_less),
        ("scattered attention", one_key_more),
    ],
)
def test_a_wrong_mask_fails_its_case(
    name: str, change: Callable[[AttentionBatch], AttentionBatch]
) -> None:
    case = next(case for case in ATTENTION if case.name == name)
    assert "out" in beyond(case, mistaken(change), torch.bfloat16)


def test_influence_of_rows_that_do_not_count_fails_its_case() -> None:
    case = next(case for case in ATTENTION if case.name == "decode attention")

    def all_count(batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, counts_influence=(True,) * batch.num_requests)

    assert beyond(case, mistaken(all_count), torch.bfloat16) == {"received"}


def _turned_back(**x: Any) -> None:
    shift_copy(**{**x, "sin": -x["sin"]})


def _offset_turned_back(**x: Any) -> None:
    torch_kernels().add_offset(**{**x, "sin": -x["sin"]})


def _offset_in_full(**x: Any) -> None:
    torch_kernels().add_offset(**{**x, "scale": 1.0})


def _nearest_only(v: Tensor, source: Tensor, anchors: Tensor) -> Tensor:
    return torch_kernels().anchor_distance(v, source, anchors[:, :1].expand_as(anchors))


def _first_anchor_left_out(
    k: Tensor, v: Tensor, offsets: Tensor, weights: Tensor, *rest: Tensor
) -> None:
    torch_kernels().add_anchored(k, v, offsets[:, 1:], weights[:, 1:], *rest)


def _one_row_short(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    torch_kernels().store_kv(k_cache, v_cache, slots[:-1], k[:-1], v[:-1])


def _other_epsilon(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch_kernels().rms_norm(x, weight, 1000 * eps + 0.1)


def _uncast(fresh: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    return torch_kernels().cosine_deviation(fresh, cache, slots.flip(0))


@pytest.mark.parametrize(
    ("kind", "wrong", "outputs"),
    [
        ("shift_copy", {"shift_copy": _turned_back}, {"k"}),
        ("add_offset", {"add_offset": _offset_turned_back}, {"k"}),
        ("add_offset", {"add_offset": _offset_in_full}, {"k", "v"}),
        ("anchors", {"anchor_distance": _nearest_only}, {"distance"}),
        ("anchors", {"add_anchored": _first_anchor_left_out}, {"k", "v"}),
        ("store_kv", {"store_kv": _one_row_short}, {"k_cache", "v_cache"}),
        ("pointwise", {"rms_norm": _other_epsilon}, {"rms_norm", "head_norm"}),
        ("deviation", {"cosine_deviation": _uncast}, {"cosine"}),
    ],
)
def test_a_wrong_kernel_fails_its_case(kind: str, wrong: dict[str, Any], outputs: set[str]) -> None:
    kernels: KernelSet = replace(torch_kernels(), **wrong)
    backend = KernelBackend("wrong", kernels, torch_attention)
    case = next(case for case in kernel_cases(tiny(), 5) if case.kind == kind)
    assert beyond(case, backend, torch.bfloat16) == outputs


def test_memory_that_nobody_writes_is_not_a_number() -> None:
    with poisoned_memory():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    zeros = {"out": torch.zeros(2, 2)}
    assert errors({"out": torch.full((2, 2), torch.nan)}, zeros, torch.float16)["out"] == math.inf


def test_an_error_is_counted_in_units_of_its_own_vector() -> None:
    wanted = {"out": torch.tensor([[1.0, 100.0], [1.0, 1.0]])}
    found = {"out": torch.tensor([[2.0, 100.0], [1.0, 1.5]])}
    eps = torch.finfo(torch.bfloat16).eps
    assert errors(found, wanted, torch.bfloat16)["out"] == pytest.approx(0.5 / eps)


def test_the_same_seed_gives_the_same_case_and_another_gives_another() -> None:
    def queries(seed: int) -> Tensor:
        return kernel_cases(tiny(), seed)[0].inputs["q"]

    assert torch.equal(queries(3), queries(3))
    assert not torch.equal(queries(3), queries(4))


def test_inputs_fit_both_16_bit_types_without_rounding() -> None:
    for case in kernel_cases(small(), 9):
        for name, value in case.inputs.items():
            if value.is_floating_point() and name not in case.wide:
                for dtype in (torch.bfloat16, torch.float16):
                    assert torch.equal(value.to(dtype).float().nan_to_num(), value.nan_to_num())
