"""The stand-in for FlashInfer's compiled modules notices what those would not.

Every case drives FlashInfer's real wrappers, which pass it on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer_contract import ContractError
from flashinfer_stand_in import (
    DECODE_PLAN,
    DECODE_RUN,
    PREFILL_PLAN,
    PREFILL_RUN,
    flashinfer_stand_in,
)
from torch import Tensor

from relaykv.kernels.scattered_causal import (
    scattered_causal_jit_args,
    scattered_causal_jit_kwargs,
)

pytestmark = pytest.mark.usefixtures("flashinfer_installed")

_HALF = torch.float16


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True)
class _Call:
    """Arguments of plan() and run() that keep the contract: 5 and 2 rows, 20 and 16 keys."""

    role: str  # "dense", "scattered", "decode" or "tensor-core decode"
    qo_indptr: Tensor = field(default_factory=lambda: _ints(0, 5, 7))
    kv_indptr: Tensor = field(default_factory=lambda: _ints(0, 2, 3))
    kv_indices: Tensor = field(default_factory=lambda: _ints(3, 0, 2))
    last_page_len: Tensor = field(default_factory=lambda: _ints(4, 16))
    heads: tuple[int, int] = (6, 2)
    page_size: int = 16
    dtype: torch.dtype = _HALF
    q: Tensor = field(default_factory=lambda: torch.randn(7, 6, 64, dtype=_HALF))
    k: Tensor = field(default_factory=lambda: torch.randn(4, 16, 2, 64, dtype=_HALF))
    v: Tensor = field(default_factory=lambda: torch.randn(4, 16, 2, 64, dtype=_HALF))
    q_pos: Tensor | None = field(default_factory=lambda: _ints(0, 3, 4, 18, 19, 0, 15))
    out: Tensor | None = None
    owns_mask: bool = True
    causal: bool = True
    num_plans: int = 1

    def make(self) -> Any:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.zeros(1 << 16, dtype=torch.uint8)
        if "decode" in self.role:
            return BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=self.role != "decode", backend="fa2"
            )
        if self.role == "dense":
            return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            backend="fa2",
            jit_args=scattered_causal_jit_args(self.dtype, 64),
            jit_kwargs=scattered_causal_jit_kwargs(),
            variant_owns_mask=self.owns_mask,
        )

    def perform(self) -> None:
        wrapper = self.make()
        indices = (self.kv_indptr, self.kv_indices, self.last_page_len)
        shape = (*self.heads, 64, self.page_size)
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        for _ in range(self.num_plans):
            if "decode" in self.role:
                wrapper.plan(*indices, *shape, **types)
            else:
                causal = self.role == "dense" and self.causal
                wrapper.plan(self.qo_indptr, *indices, *shape, causal=causal, **types)
        extra = (self.q_pos,) if self.role == "scattered" and self.q_pos is not None else ()
        wrapper.run(self.q, (self.k, self.v), *extra, out=self.out)


def _decode(role: str) -> _Call:
    return replace(_Call(role), q=torch.randn(2, 6, 64, dtype=_HALF))


_RIGHT = {
    "dense": _Call("dense"),
    "scattered": _Call("scattered"),
    "decode": _decode("decode"),
    "tensor-core decode": _decode("tensor-core decode"),
}

_LONG = torch.int64
_WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "64-bit indptr": (
        "dense",
        {"qo_indptr": _ints(0, 5, 7, dtype=_LONG), "kv_indptr": _ints(0, 2, 3, dtype=_LONG)},
        "qo_indptr must be int32",
    ),
    "64-bit pages": (
        "dense", {"kv_indices": _ints(3, 0, 2, dtype=_LONG)}, "kv_indices must be int32"
    ),
    "64-bit pages of decodes": (
        "decode", {"kv_indices": _ints(3, 0, 2, dtype=_LONG)}, "kv_indices must be int32"
    ),
    "64-bit last page lengths": (
        "dense", {"last_page_len": _ints(4, 16, dtype=_LONG)}, "must be int32"
    ),
    "an empty last page": ("dense", {"last_page_len": _ints(0, 16)}, "1 to page size"),
    "an empty last page of a decode": ("decode", {"last_page_len": _ints(0, 16)}, "1 to page size"),
    "a last page longer than a page": ("scattered", {"last_page_len": _ints(4, 17)}, "1 to page"),
    "more rows than keys under the causal mask": (
        "dense", {"kv_indptr": _ints(0, 1, 3), "last_page_len": _ints(4, 16)}, "more rows than keys"
    ),
    "fewer pages than indptr says": ("dense", {"kv_indices": _ints(3, 0)}, "shorter than"),
    "fewer pages than indptr says, decoding": (
        "tensor-core decode", {"kv_indices": _ints(3, 0)}, "shorter than kv_indptr"
    ),
    "an indptr that begins late": ("dense", {"kv_indptr": _ints(1, 2, 3)}, "must begin with 0"),
    "an indptr that decreases": ("dense", {"kv_indptr": _ints(0, 4, 3)}, "must not decrease"),
    "indptrs of different lengths": (
        "scattered", {"qo_indptr": _ints(0, 5, 6, 7)}, "differ in length"
    ),
    "a negative page": ("dense", {"kv_indices": _ints(3, -1, 2)}, "pages that exist"),
    "a page behind the cache": ("decode", {"kv_indices": _ints(3, 4, 2)}, "pages that exist"),
    "rows without keys": (
        "scattered", {"kv_indptr": _ints(0, 2, 2), "last_page_len": _ints(4, 0)}, "without keys"
    ),
    "single precision": (
        "scattered",
        {"dtype": torch.float32} | {x: getattr(_Call("dense"), x).float() for x in "qkv"},
        "16-bit types only",
    ),
    "values of another type than planned": (
        "dense", {"v": torch.randn(4, 16, 2, 64).bfloat16()}, "v must be torch.float16"
    ),
    "keys and values of different strides": (
        "dense", {"v": torch.randn(4, 2, 16, 64).half().transpose(1, 2)}, "strides differ"
    ),
    "heads before tokens in a page": (
        "dense",
        {x: torch.randn(4, 2, 16, 64).half() for x in "kv"},
        "is not .pages, page size, heads, dim",
    ),
    "another page size than planned": ("dense", {"page_size": 32}, "as planned"),
    "other heads than planned": ("dense", {"heads": (4, 2)}, "as planned"),
    "key heads that do not divide the heads": ("dense", {"heads": (6, 4)}, "evenly"),
    "queries whose head dimension is not dense": (
        "dense", {"q": torch.randn(7, 64, 6).half().transpose(1, 2)}, "must be dense"
    ),
    "queries that are not aligned": (
        "dense", {"q": torch.randn(7 * 6 * 64 + 1).half()[1:].view(7, 6, 64)}, "multiples of 16"
    ),
    "a result that is not contiguous": (
        "dense", {"out": torch.empty(7, 12, 64, dtype=_HALF)[:, :6]}, "out must be contiguous"
    ),
    "64-bit positions": (
        "scattered", {"q_pos": _ints(0, 3, 4, 18, 19, 0, 15, dtype=_LONG)}, "q_pos must be int32"
    ),
    "too few positions": ("scattered", {"q_pos": _ints(0, 3, 4, 18, 19, 0)}, "one position a row"),
    "a position behind the group's keys": (
        "scattered", {"q_pos": _ints(0, 3, 4, 18, 20, 0, 15)}, "among the keys"
    ),
    "a negative position": ("scattered", {"q_pos": _ints(-1, 3, 4, 18, 19, 0, 15)}, "among the"),
    "positions that do not rise": (
        "scattered", {"q_pos": _ints(0, 4, 3, 18, 19, 0, 15)}, "must rise"
    ),
    "no positions": ("scattered", {"q_pos": None}, "needs q_pos"),
    "a variant that does not own its mask": ("scattered", {"owns_mask": False}, "own the mask"),
    "a second plan while the first is copied": ("dense", {"num_plans": 2}, "copy is pending"),
    "a second plan of decodes while the first is copied": (
        "decode", {"num_plans": 2}, "copy is pending"
    ),
    "a ratio of heads that the decode kernel lacks": (
        "decode", {"heads": (14, 2), "q": torch.randn(2, 14, 64).half()}, "no decode kernel"
    ),
}  # fmt: skip


@pytest.mark.parametrize("role", list(_RIGHT))
def test_right_arguments_pass(role: str) -> None:
    with flashinfer_stand_in(slow_copies=True) as stand_in:
        _RIGHT[role].perform()
        assert stand_in.num_runs == 1


@pytest.mark.parametrize("name", list(_WRONG))
def test_the_contract_catches(name: str) -> None:
    role, changes, rule = _WRONG[name]
    call = replace(_RIGHT[role], **changes)
    with flashinfer_stand_in(slow_copies=True), pytest.raises(ContractError, match=rule):
        call.perform()


def test_a_name_that_flashinfer_no_longer_has_fails_and_does_not_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashinfer import prefill

    monkeypatch.delattr(prefill, "_gen_batch_prefill_primary_module")
    with (
        pytest.raises(AssertionError, match="_gen_batch_prefill_primary_module: adapt"),
        flashinfer_stand_in(),
    ):
        pass


def test_behind_the_stand_in_everything_is_as_before() -> None:
    from flashinfer import decode, prefill

    before = (torch.empty, dict(vars(prefill)), dict(vars(decode)))
    with pytest.raises(RuntimeError, match="in the middle"), flashinfer_stand_in():
        raise RuntimeError("in the middle")
    assert (torch.empty, dict(vars(prefill)), dict(vars(decode))) == before
    assert prefill.get_batch_prefill_module.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("source", "function", "names"),
    [
        ("batch_prefill.cu", "BatchPrefillWithKVCachePlan", PREFILL_PLAN),
        ("batch_prefill_paged.cuh", "BatchPrefillWithPagedKVCacheRun", PREFILL_RUN),
        ("batch_decode.cu", "BatchDecodeWithPagedKVCachePlan", DECODE_PLAN),
        ("batch_decode.cu", "BatchDecodeWithPagedKVCacheRun", DECODE_RUN),
    ],
    ids=lambda value: value if value[0].isupper() and len(value) < 40 else None,
)
def test_the_stand_ins_parameters_are_those_of_the_installed_sources(
    source: str, function: str, names: str
) -> None:
    import flashinfer

    text = (Path(flashinfer.__file__).parent / "data" / "csrc" / source).read_text()
    match = re.search(rf"\b{function}\((.*?)\) *{{", text, re.DOTALL)
    assert match is not None
    declared = match[1].replace("ADDITIONAL_FUNC_PARAMS", "")
    parameters = [re.sub(r"=.*", "", part).split()[-1] for part in declared.split(",")]
    assert parameters == names.split()
