"""Root-mean-square normalisation on a CUDA device: `rms_norm` by FlashInfer.

FlashInfer multiplies with the weight in fp32 and rounds once, where Llama's own code, and so
`rms_norm`, rounds to the 16-bit type before it does: results may differ in the last bit. Fused with
the addition it also normalises the fp32 sum before that is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FlashInferNorms:
    """FlashInfer's two norms, for bf16 and fp16. The first call of each compiles its kernel."""

    def __init__(self) -> None:
        """
        Raises:
            ModuleNotFoundError: FlashInfer is not installed.
        """
        from flashinfer.norm import fused_add_rmsnorm, rmsnorm

        self._rmsnorm = rmsnorm
        self._fused_add_rmsnorm = fused_add_rmsnorm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Leaves `x` as it is; see `rms_norm.rms_norm`.

        Args:
            x: [n, d] or [n, H, d]; only the last dimension must be dense, so heads may be a slice
                of a fused projection.
            weight: [d], the dtype of `x`.
            eps: added to the mean square.

        Returns:
            A new tensor of the shape and dtype of `x`.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0]:  # a step that samples nothing has no rows, and an empty grid is an error
            self._rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Overwrites `x` with the normalised sum, `residual` with the sum, and returns the two.

        See `rms_norm.add_rms_norm`.

        Args:
            x: [n, d], given away.
            residual: [n, d], given away; other memory than `x`.
            weight: [d], the dtype of `x`.
            eps: added to the mean square.

        Returns:
            `x` and `residual`.
        """
        if x.shape[0]:
            self._fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual
