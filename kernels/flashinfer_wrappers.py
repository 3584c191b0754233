"""FlashInfer's paged wrappers, each with what it is planned for.

A wrapper's plan() writes a schedule into a pinned host buffer of the wrapper and copies it to the
device without waiting. A second plan() on the same wrapper would overwrite the buffer while the
first copy is still queued behind earlier steps, and the first plan's kernels would then run with
the second one's schedule. So whoever plans a wrapper again first waits for an event that was
recorded behind its previous plan, and a few wrappers per role take turns so that the wait is over
before it begins. The schedule on the device needs no such care: its copy and the kernels that
read it are in order on one stream, and so is all use of the float workspace, which wrappers share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from relaykv.kernels.attention_plan import Int32Array, PagedIndices
from relaykv.kernels.scattered_causal import (
    scattered_causal_jit_args,
    scattered_causal_jit_kwargs,
)

# FlashInfer allocates 8 MiB per wrapper, pinned and on the device each, for schedules that take
# some tens of bytes a row; it says so itself when they do not fit.
_SCHEDULE_BYTES = 2 << 20
# Query heads per key head that the decode kernel without tensor cores is compiled for, and from
# how many on a tile of tensor cores is filled well enough to be worth it.
_CUDA_CORE_RATIOS = (1, 2, 3, 4, 6, 8, 16)
_TENSOR_CORE_RATIO = 4


class PlanEvent(Protocol):
    """What of `torch.cuda.Event` is needed."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def gqa(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The rows [start, stop) of a batch that one wrapper attends; on the host."""

    start: int
    stop: int
    indices: PagedIndices
    num_keys: Int32Array  # [groups]

    def equals(self, other: PartLayout) -> bool:
        return (
            np.array_equal(self.num_keys, other.num_keys)
            and np.array_equal(self.indices.qo_indptr, other.indices.qo_indptr)
            and np.array_equal(self.indices.kv_indices, other.indices.kv_indices)
        )


@dataclass(frozen=True, slots=True)
class PartPlan:
    layout: PartLayout
    kv_indices: Tensor  # int32, on the device


@dataclass(frozen=True, slots=True)
class _HostIndices:
    """int32 tensors on the host, where plan() reads them: a device tensor would cost a wait."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    num_keys: Tensor


class PlannedWrapper:
    """A wrapper, what it is planned for, and when it may be planned again."""

    def __init__(
        self,
        wrapper: Any,
        plan: Callable[[Any, PartPlan], None],
        new_event: Callable[[], PlanEvent] | None,
    ) -> None:
        self.wrapper = wrapper
        self._plan = plan
        self._new_event = new_event
        self._copied: PlanEvent | None = None
        self._held: PartLayout | None = None

    def holds(self, layout: PartLayout) -> bool:
        return self._held is layout

    def adopt(self, layout: PartLayout) -> bool:
        """Takes an equal layout for the one that is planned; its device arrays are equal too."""
        if self._held is None or not self._held.equals(layout):
            return False
        self._held = layout
        return True

    def plan(self, part: PartPlan) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._held = None  # also if planning fails
        self._plan(self.wrapper, part)
        if self._new_event is not None:
            self._copied = self._new_event()
            self._copied.record()
        self._held = part.layout


class WrapperRing:
    """Wrappers of one role that take turns."""

    def __init__(self, wrappers: Sequence[PlannedWrapper]) -> None:
        self._wrappers = wrappers
        self._next = 0

    def planned(self, part: PartPlan) -> Any:
        """A wrapper that is planned for a part; the row sets of a step often have equal ones."""
        for wrapper in self._wrappers:
            if wrapper.holds(part.layout):
                return wrapper.wrapper
        for wrapper in self._wrappers:
            if wrapper.adopt(part.layout):
                return wrapper.wrapper
        wrapper = self._wrappers[self._next]
        self._next = (self._next + 1) % len(self._wrappers)
        wrapper.plan(part)
        return wrapper.wrapper


class WrapperFactory:
    """Makes wrappers of one shape that share a float workspace."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        deterministic: bool,
        workspace_bytes: int,
        tensor_core_decode: bool | None,
        new_event: Callable[[], PlanEvent] | None,
    ) -> None:
        """See `FlashInferAttention`.

        Raises:
            ModuleNotFoundError: FlashInfer is not installed.
        """
        try:
            from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
            from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"attention on CUDA needs FlashInfer ({error}): install relaykv[cuda]",
                name=error.name,
            ) from error
        self._decode_class = BatchDecodeWithPagedKVCacheWrapper
        self._prefill_class = BatchPrefillWithPagedKVCacheWrapper
        self._shape = shape
        self._deterministic = deterministic
        if tensor_core_decode is None:
            tensor_core_decode = shape.gqa >= _TENSOR_CORE_RATIO
        # The kernel without tensor cores splits keys as the batch suggests, whatever one asks for.
        self._tensor_core_decode = (
            tensor_core_decode or deterministic or shape.gqa not in _CUDA_CORE_RATIOS
        )
        self._new_event = new_event
        # Zeroed, as the decode wrapper asks for.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=shape.device)

    def decode_ring(self, size: int) -> WrapperRing:
        return WrapperRing([self._planned(self._decode(), self._plan_decode) for _ in range(size)])

    def dense_ring(self, size: int) -> WrapperRing:
        """Groups whose rows have no gap and end with the group's last key."""
        make = self._prefill_class
        wrappers = [make(self._workspace, "NHD", backend="fa2") for _ in range(size)]
        return WrapperRing([self._planned(w, self._plan_causal) for w in wrappers])

    def scattered_ring(self, size: int) -> WrapperRing:
        """Groups whose rows may have gaps; builds the variant, which takes minutes the first time.

        Its wrappers' run takes each row's position as one more argument.
        """
        wrappers = [
            self._prefill_class(
                self._workspace,
                "NHD",
                backend="fa2",
                jit_args=scattered_causal_jit_args(self._shape.dtype, self._shape.head_dim),
                jit_kwargs=scattered_causal_jit_kwargs(),
                variant_owns_mask=True,
            )
            for _ in range(size)
        ]
        return WrapperRing([self._planned(w, self._plan_scattered) for w in wrappers])

    def graph_decode(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor
    ) -> PlannedWrapper:
        """A decode wrapper that a CUDA graph can hold: its index arrays live in the given buffers.

        Args:
            indptr: int32 [rows + 1], on the device like the others.
            indices: int32, for as many blocks as rows will ever have together.
            last_page_len: int32 [rows].
        """
        wrapper = self._decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        return self._planned(wrapper, self._plan_decode)

    def _decode(self, **graph: Any) -> Any:
        use_tensor_cores = self._tensor_core_decode
        return self._decode_class(
            self._workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2", **graph
        )

    def _planned(self, wrapper: Any, plan: Callable[[Any, PartPlan], None]) -> PlannedWrapper:
        schedule = torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=self._shape.device)
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return PlannedWrapper(wrapper, plan, self._new_event)

    def _plan_decode(self, wrapper: Any, part: PartPlan) -> None:
        host = self._host(part.layout)
        wrapper.plan(
            host.kv_indptr,
            part.kv_indices,
            host.last_page_len,
            self._shape.num_heads,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            self._shape.block_size,
            q_data_type=self._shape.dtype,
            kv_data_type=self._shape.dtype,
            sm_scale=self._shape.scale,
            seq_lens=host.num_keys,
            disable_split_kv=self._deterministic,
        )

    def _plan_causal(self, wrapper: Any, part: PartPlan) -> None:
        self._plan_prefill(wrapper, part, causal=True)

    def _plan_scattered(self, wrapper: Any, part: PartPlan) -> None:
        self._plan_prefill(wrapper, part, causal=False)

    def _plan_prefill(self, wrapper: Any, part: PartPlan, *, causal: bool) -> None:
        host = self._host(part.layout)
        wrapper.plan(
            host.qo_indptr,
            host.kv_indptr,
            part.kv_indices,
            host.last_page_len,
            self._shape.num_heads,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            self._shape.block_size,
            causal=causal,
            q_data_type=self._shape.dtype,
            kv_data_type=self._shape.dtype,
            sm_scale=self._shape.scale,
            seq_lens=host.num_keys,
            disable_split_kv=self._deterministic,
        )

    def _host(self, part: PartLayout) -> _HostIndices:
        """The index arrays of a part in pinned memory: copies from any other may wait.

        Torch keeps the memory until the copies that plan() queues from it are done.
        """
        indices = part.indices
        arrays = (indices.qo_indptr, indices.kv_indptr, indices.last_page_len, part.num_keys)
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        pin = self._shape.device.type == "cuda"
        packed = torch.empty(ends[-1], dtype=torch.int32, pin_memory=pin)
        np.concatenate(arrays, out=packed.numpy())
        return _HostIndices(
            packed[: ends[0]],
            packed[ends[0] : ends[1]],
            packed[ends[1] : ends[2]],
            packed[ends[2] :],
        )
