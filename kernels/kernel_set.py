"""The kernels that an engine calls, as one value per device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from relaykv.kernels.activation import silu_and_mul
from relaykv.kernels.add_anchored import add_anchored
from relaykv.kernels.add_offset import add_offset
from relaykv.kernels.anchor_distance import anchor_distance
from relaykv.kernels.deviation import cosine_deviation, squared_deviation
from relaykv.kernels.influence import add_influence
from relaykv.kernels.rms_norm import add_rms_norm, rms_norm
from relaykv.kernels.rope import apply_rope
from relaykv.kernels.shift_copy import shift_copy
from relaykv.kernels.store_kv import store_kv


class ShiftCopy(Protocol):
    """See `shift_copy.shift_copy`."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        influence: Tensor,
        source: Tensor,
        target: Tensor,
        segment: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None: ...


class AddOffset(Protocol):
    """See `add_offset.add_offset`."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        index: Tensor,
        target: Tensor,
        segment: Tensor,
        cos: Tensor,
        sin: Tensor,
        scale: float,
    ) -> None: ...


class AddAnchored(Protocol):
    """See `add_anchored.add_anchored`."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        weights: Tensor,
        target: Tensor,
        segment: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None: ...


class AddInfluence(Protocol):
    """See `influence.add_influence`."""

    def __call__(
        self,
        received: Tensor,
        q: Tensor,
        k_cache: Tensor,
        lse: Tensor,
        block_ids: Tensor,
        block_indptr: Tensor,
        num_keys: Tensor,
        counts: Tensor,
        block_size: int,
        scale: float,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What an engine computes with besides matrix products, attention and sampling.

    Each field has the meaning of the function of that name in this folder.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    shift_copy: ShiftCopy
    add_offset: AddOffset
    anchor_distance: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_anchored: AddAnchored
    cosine_deviation: Callable[[Tensor, Tensor, Tensor], Tensor]
    squared_deviation: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_influence: AddInfluence


def torch_kernels() -> KernelSet:
    """Plain torch, on any device; loads neither Triton nor FlashInfer."""
    return KernelSet(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        apply_rope=apply_rope,
        store_kv=store_kv,
        shift_copy=shift_copy,
        add_offset=add_offset,
        anchor_distance=anchor_distance,
        add_anchored=add_anchored,
        cosine_deviation=cosine_deviation,
        squared_deviation=squared_deviation,
        add_influence=add_influence,
    )


def cuda_kernels() -> KernelSet:
    """Triton's and FlashInfer's, for 16-bit tensors on a CUDA device.

    Raises:
        ModuleNotFoundError: Triton or FlashInfer is not installed.
    """
    from relaykv.kernels.activation_flashinfer import load_silu_and_mul
    from relaykv.kernels.add_anchored_triton import add_anchored_triton
    from relaykv.kernels.add_offset_triton import add_offset_triton
    from relaykv.kernels.anchor_distance_triton import anchor_distance_triton
    from relaykv.kernels.deviation_triton import cosine_deviation_triton, squared_deviation_triton
    from relaykv.kernels.influence_triton import add_influence_triton
    from relaykv.kernels.rms_norm_flashinfer import FlashInferNorms
    from relaykv.kernels.shift_copy_triton import shift_copy_triton
    from relaykv.kernels.store_kv_triton import store_kv_triton

    norms = FlashInferNorms()
    return KernelSet(
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        silu_and_mul=load_silu_and_mul(),
        apply_rope=apply_rope,
        store_kv=store_kv_triton,
        shift_copy=shift_copy_triton,
        add_offset=add_offset_triton,
        anchor_distance=anchor_distance_triton,
        add_anchored=add_anchored_triton,
        cosine_deviation=cosine_deviation_triton,
        squared_deviation=squared_deviation_triton,
        add_influence=add_influence_triton,
    )
