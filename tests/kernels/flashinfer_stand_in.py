"""FlashInfer's real Python wrappers on CPU tensors, with only the compiled modules replaced.

Inside `flashinfer_stand_in()` everything of FlashInfer runs as it is installed, down to the calls
of compiled functions; those get a module that checks their raw arguments against
`flashinfer_contract` and computes the attention in torch. No kernel runs: what a device computes
is not shown by it.

    with flashinfer_stand_in() as stand_in:
        attention = FlashInferAttention(..., torch.device("cpu"), add_influence=add_influence)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from flashinfer_contract import (
    CUDA_CORE_RATIOS,
    PlannedBatch,
    Run,
    causal_mask,
    check_host_array,
    position_mask,
    require,
)
from torch import Tensor

_NON_CAUSAL, _CAUSAL, _CUSTOM = 0, 1, 2  # flashinfer.utils.MaskMode


# The parameters of the compiled functions, as csrc/batch_prefill.cu, batch_prefill_paged.cuh and
# batch_decode.cu name them; runs take those of the attention variant behind them.
PREFILL_PLAN = """
    float_workspace_buffer int_workspace_buffer page_locked_int_workspace_buffer qo_indptr kv_indptr
    kv_len_arr total_num_rows batch_size num_qo_heads num_kv_heads page_size enable_cuda_graph
    head_dim_qk head_dim_vo causal window_left fixed_split_size disable_split_kv
    num_colocated_ctas uniform_q_len fixed_uniform_q_len
"""
PREFILL_RUN = """
    float_workspace_buffer int_workspace_buffer plan_info_vec q paged_k_cache paged_v_cache
    qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len o maybe_lse mask_mode_code
    layout window_left enable_pdl
"""
DECODE_PLAN = """
    float_workspace_buffer int_workspace_buffer page_locked_int_workspace_buffer indptr batch_size
    num_qo_heads num_kv_heads page_size enable_cuda_graph window_left logits_soft_cap head_dim_qk
    head_dim_vo empty_q_data empty_kv_data
"""
DECODE_RUN = """
    float_workspace_buffer int_workspace_buffer plan_info_vec q paged_k_cache paged_v_cache
    paged_kv_indptr paged_kv_indices paged_kv_last_page_len o maybe_lse kv_layout_code window_left
    enable_pdl
"""
_VARIANT = "q_pos sm_scale"
_STOCK_PREFILL = """
    custom_mask mask_indptr alibi_slopes prefix_len token_pos max_item_len k_sf v_sf
    logits_soft_cap sm_scale rope_rcp_scale rope_rcp_theta token_pos_in_items_len
"""
_STOCK_DECODE = "alibi_slopes logits_soft_cap sm_scale rope_rcp_scale rope_rcp_theta"


@dataclass(frozen=True, eq=False)
class _Module:
    """The functions of a compiled module; FlashInfer uses them as keys of caches."""

    plan: Callable[..., list[int]]
    run: Callable[..., None]

    @property
    def paged_run(self) -> Callable[..., None]:
        return self.run

    @property
    def ragged_run(self) -> Callable[..., None]:
        return _refuse("attention without pages")

    def build_and_load(self) -> _Module:
        return self


class StandIn:
    """Makes the modules, and knows which plans they were asked for.

    With `slow_copies`, the copy that a plan queues is pending until an event recorded behind it
    has been waited for, as on a busy device; else it is done at once.
    """

    def __init__(self, slow_copies: bool) -> None:
        self._slow_copies = slow_copies
        # By the address of a wrapper's schedule on the device. The tensor is kept, so that no
        # other gets its address.
        self._planned: dict[int, tuple[Tensor, PlannedBatch]] = {}
        self._pending: dict[int, Tensor] = {}  # pinned buffers that are still being read
        self.plans: list[PlannedBatch] = []
        self.num_waits = 0
        self.num_runs = 0

    def new_event(self) -> _Event:
        return _Event(self)

    def copies_pending(self) -> set[int]:
        return set(self._pending)

    def finish_copies(self, pinned: set[int]) -> None:
        for address in pinned:
            self._pending.pop(address, None)

    def prefill_module(self, dtype: torch.dtype, is_variant: bool) -> _Module:
        """What a compiled batch prefill module exports, stock or with the scattered variant."""

        def plan(*arguments: Any) -> list[int]:
            return self._plan_prefill(_bind(PREFILL_PLAN, arguments))

        def run(*arguments: Any) -> None:
            names = PREFILL_RUN + (_VARIANT if is_variant else _STOCK_PREFILL)
            self._run_prefill(dtype, is_variant, _bind(names, arguments))

        return _Module(plan, run)

    def decode_module(self, dtype: torch.dtype) -> _Module:
        """What a compiled decode module without tensor cores exports."""

        def plan(*arguments: Any) -> list[int]:
            return self._plan_decode(_bind(DECODE_PLAN, arguments))

        def run(*arguments: Any) -> None:
            self._run_decode(dtype, _bind(DECODE_RUN + _STOCK_DECODE, arguments))

        return _Module(plan, run)

    def _plan_prefill(self, given: SimpleNamespace) -> list[int]:
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            check_host_array(name, getattr(given, name))
        as_many = given.batch_size == len(given.kv_len_arr) == len(given.kv_indptr) - 1
        require(as_many, "qo_indptr and kv_indptr differ in length")
        require(given.num_colocated_ctas == 0, "nothing runs beside it")
        if given.enable_cuda_graph:
            decodes = given.uniform_q_len == 1 and given.fixed_uniform_q_len
            require(decodes, "graphs hold decodes only")
        else:
            last = int(given.qo_indptr[-1])
            require(given.total_num_rows == last, "total_num_rows is qo_indptr's last")
        kv_lens = tuple(given.kv_len_arr.tolist())
        qo_indptr = tuple(given.qo_indptr.tolist())
        return self._add_plan(given, qo_indptr, given.kv_indptr, kv_lens, given.causal)

    def _plan_decode(self, given: SimpleNamespace) -> list[int]:
        check_host_array("kv_indptr", given.indptr)
        ratio = given.num_qo_heads // given.num_kv_heads
        require(ratio in CUDA_CORE_RATIOS, "no decode kernel for this ratio of heads")
        require(given.logits_soft_cap == 0, "no cap")
        require(given.empty_q_data.dtype == given.empty_kv_data.dtype, "queries and keys of a type")
        qo_indptr = tuple(range(given.batch_size + 1))
        return self._add_plan(given, qo_indptr, given.indptr, None, False)

    def _add_plan(
        self,
        given: SimpleNamespace,
        qo_indptr: tuple[int, ...],
        kv_indptr: Tensor,
        kv_lens: tuple[int, ...] | None,
        causal: bool,
    ) -> list[int]:
        schedule, pinned = given.int_workspace_buffer, given.page_locked_int_workspace_buffer
        aligned = given.float_workspace_buffer.data_ptr() % 16 == 0
        require(aligned, "the workspace must be aligned")
        require(pinned.numel() == schedule.numel(), "schedules on both sides are of one size")
        is_free = pinned.data_ptr() not in self._pending
        require(is_free, "a second plan() on a wrapper whose copy is pending")
        require(given.window_left == -1, "no window")
        require(given.head_dim_qk == given.head_dim_vo, "keys and values have one head dimension")
        batch = PlannedBatch(
            serial=len(self.plans),
            qo_indptr=qo_indptr,
            kv_indptr=tuple(kv_indptr.tolist()),
            kv_lens=kv_lens,
            num_heads=given.num_qo_heads,
            num_kv_heads=given.num_kv_heads,
            head_dim=given.head_dim_qk,
            page_size=given.page_size,
            causal=causal,
            cuda_graph=given.enable_cuda_graph,
            splits=not getattr(given, "disable_split_kv", False),
        )
        batch.check()
        if self._slow_copies:
            self._pending[pinned.data_ptr()] = pinned
        self._planned[schedule.data_ptr()] = (schedule, batch)
        self.plans.append(batch)
        return _plan_info(batch)

    def _plan_of(self, given: SimpleNamespace) -> PlannedBatch:
        _, batch = self._planned[given.int_workspace_buffer.data_ptr()]
        require(given.plan_info_vec == _plan_info(batch), "run() with another plan's schedule")
        self.num_runs += 1
        return batch

    def _run_prefill(self, dtype: torch.dtype, is_variant: bool, given: SimpleNamespace) -> None:
        batch = self._plan_of(given)
        run = _run(given, given.qo_indptr, given.layout)
        run.check(batch, dtype)
        if is_variant:
            require(given.mask_mode_code == _CUSTOM, "the variant must own the mask")
            require(isinstance(given.q_pos, Tensor), "the variant needs q_pos")
            run.attend(position_mask(run, given.q_pos))
            return
        planned_mode = _CAUSAL if batch.causal else _NON_CAUSAL
        require(given.mask_mode_code == planned_mode, "the mask must be the planned one")
        require(given.custom_mask is None, "no mask of one's own without a variant")
        run.attend(lambda _, rows, keys: causal_mask(rows, keys) if batch.causal else None)

    def _run_decode(self, dtype: torch.dtype, given: SimpleNamespace) -> None:
        batch = self._plan_of(given)
        qo_indptr = torch.arange(len(given.paged_kv_indptr), dtype=torch.int32)
        run = _run(given, qo_indptr, given.kv_layout_code)
        run.check(batch, dtype)
        run.attend(lambda *_: None)


def _plan_info(batch: PlannedBatch) -> list[int]:
    """A graph keeps the numbers that its first plan returned, whatever it is planned for later."""
    return [-1 if batch.cuda_graph else batch.serial]


def _run(given: SimpleNamespace, qo_indptr: Tensor, layout: int) -> Run:
    return Run(
        q=given.q,
        k=given.paged_k_cache,
        v=given.paged_v_cache,
        qo_indptr=qo_indptr,
        kv_indptr=given.paged_kv_indptr,
        kv_indices=given.paged_kv_indices,
        last_page_len=given.paged_kv_last_page_len,
        out=given.o,
        lse=given.maybe_lse,
        layout=layout,
        window_left=given.window_left,
        sm_scale=given.sm_scale,
    )


def _bind(names: str, arguments: Sequence[Any]) -> SimpleNamespace:
    parameters = names.split()
    as_many = len(parameters) == len(arguments)
    require(as_many, f"{len(arguments)} arguments for {len(parameters)} parameters")
    return SimpleNamespace(**dict(zip(parameters, arguments, strict=True)))


class _Event:
    """`torch.cuda.Event`, as far as pending copies are concerned."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._behind: set[int] = set()

    def record(self) -> None:
        self._behind = self._stand_in.copies_pending()

    def synchronize(self) -> None:
        self._stand_in.num_waits += 1
        self._stand_in.finish_copies(self._behind)


@contextmanager
def flashinfer_stand_in(slow_copies: bool = False) -> Iterator[StandIn]:
    """Replaces what FlashInfer compiles, and pinned memory, which a CPU build of torch lacks."""
    import flashinfer
    from flashinfer import decode, prefill

    stand_in = StandIn(slow_copies)
    version = flashinfer.__version__

    real_gen_variant = _attribute(prefill, "gen_customize_batch_prefill_module", version)

    def gen_stock(backend: str, dtype: torch.dtype, *_: Any) -> _Module:
        require(backend == "fa2", "the backend must be fa2")
        return stand_in.prefill_module(dtype, is_variant=False)

    def gen_decode(dtype: torch.dtype, *_: Any) -> _Module:
        return stand_in.decode_module(dtype)

    def gen_variant(*arguments: Any, **options: Any) -> _Module:
        given = SimpleNamespace(**signature(real_gen_variant).bind(*arguments, **options).arguments)
        _check_variant(given)
        return stand_in.prefill_module(given.dtype_q, is_variant=True)

    def lazy_independent(*_: Any) -> SimpleNamespace:
        # What FlashInfer would build for keys and values of different strides.
        return SimpleNamespace(get=_refuse("a module for keys and values whose strides differ"))

    # Without the cache around it, which would outlive the stand-in.
    uncached = _attribute(prefill, "get_customize_batch_prefill_module", version).__wrapped__
    caches = [
        _attribute(module, name, version).cache_clear
        for module, name in (
            (prefill, "get_batch_prefill_module"),
            (decode, "get_batch_decode_module"),
        )
    ]
    patches: list[tuple[ModuleType, str, Any]] = [
        (prefill, "_gen_batch_prefill_primary_module", gen_stock),
        (prefill, "_gen_batch_prefill_independent_paged_module", lambda *_: None),
        (prefill, "_LazyBatchPrefillIndependentModule", lazy_independent),
        (prefill, "gen_customize_batch_prefill_module", gen_variant),
        (prefill, "get_customize_batch_prefill_module", uncached),
        (decode, "gen_batch_decode_module", gen_decode),
        (torch, "empty", _empty_without_pinning(torch.empty)),
    ]
    with ExitStack() as stack:
        for clear in caches:
            clear()
            stack.callback(clear)
        for module, name, replacement in patches:
            _attribute(module, name, version)
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield stand_in


def _attribute(module: ModuleType, name: str, version: str) -> Any:
    if not hasattr(module, name):
        raise AssertionError(
            f"FlashInfer {version} has no {module.__name__}.{name}: adapt the stand-in to it"
        )
    return getattr(module, name)


def _check_variant(given: SimpleNamespace) -> None:
    require(given.backend == "fa2", "only fa2 has masks of one's own")
    require(given.dtype_q == given.dtype_kv == given.dtype_o, "one type for all")
    require(given.dtype_q in (torch.bfloat16, torch.float16), "16-bit types only")
    require(given.idtype == torch.int32, "indices are int32")
    require(given.head_dim_qk == given.head_dim_vo, "keys and values have one head dimension")
    tensors = (list(given.additional_tensor_names), list(given.additional_tensor_dtypes))
    require(tensors == (["q_pos"], ["int32_t"]), "the variant takes q_pos")
    scalars = (list(given.additional_scalar_names), list(given.additional_scalar_dtypes))
    require(scalars == (["sm_scale"], ["double"]), "the variant takes sm_scale")
    declared = f"struct {given.variant_name} : AttentionVariantBase" in given.variant_decl
    require(declared, "the variant must be declared under its name")


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        require(False, f"{what} is not to be used")

    return refuse


def _empty_without_pinning(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty_on_cpu(*arguments: Any, **options: Any) -> Tensor:
        options.pop("pin_memory", None)
        return empty(*arguments, **options)

    return empty_on_cpu
