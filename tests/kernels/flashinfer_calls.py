"""A stand-in for FlashInfer's elementwise functions, which have no CPU version.

It holds every call against the installed package's own signature and against what the kernels take
for granted (read in `norm.cu`, `norm.cuh` and `activation.cuh` of FlashInfer 0.7.4), then computes
the result in torch with the kernels' rounding: in fp32, to 16 bits once.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import flashinfer.activation
import flashinfer.norm
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class FlashInferCalls:
    """Names of the functions called so far."""

    names: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes the place of the functions that our wrappers import when they are made."""
        for module, name, stand_in in (
            (flashinfer.norm, "rmsnorm", self._rmsnorm),
            (flashinfer.norm, "fused_add_rmsnorm", self._fused_add_rmsnorm),
            (flashinfer.activation, "silu_and_mul", self._silu_and_mul),
        ):
            signature = inspect.signature(getattr(module, name))
            monkeypatch.setattr(module, name, self._bound(name, signature, stand_in))

    def _bound(self, name: str, signature: inspect.Signature, stand_in: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return stand_in(bound.arguments)

        return call

    @staticmethod
    def _rmsnorm(given: dict[str, Any]) -> Tensor:
        x, weight, out = given["input"], given["weight"], given["out"]
        assert x.ndim in (2, 3)
        assert out.shape == x.shape
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        _check(x, weight, out)
        normed: Tensor = out.copy_(_norm(x.float(), weight, given["eps"]))
        return normed

    @staticmethod
    def _fused_add_rmsnorm(given: dict[str, Any]) -> None:
        x, residual, weight = given["input"], given["residual"], given["weight"]
        assert x.ndim == 2
        assert residual.shape == x.shape
        assert residual.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        _check(x, weight, residual)
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(_norm(total, weight, given["eps"]))

    @staticmethod
    def _silu_and_mul(given: dict[str, Any]) -> Tensor:
        x = given["input"]
        assert x.is_contiguous()
        assert x.shape[0] > 0
        assert x.dtype in (torch.bfloat16, torch.float16)
        gate, up = x.float().chunk(2, dim=-1)
        product: Tensor = (F.silu(gate) * up).to(x.dtype)
        return product


def _check(x: Tensor, weight: Tensor, other: Tensor) -> None:
    assert x.shape[0] > 0, "an empty grid"
    assert weight.shape == x.shape[-1:]
    for tensor in (x, weight, other):
        assert tensor.dtype is x.dtype
        assert tensor.dtype in (torch.bfloat16, torch.float16)
        assert tensor.stride(-1) == 1
        # Vectors of 16 bytes are loaded from the start of every row.
        assert tensor.data_ptr() % 16 == 0
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])


def _norm(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
