"""Gated activation on a CUDA device: `activation` by FlashInfer.

FlashInfer multiplies in fp32 and rounds once, where plain torch rounds silu(gate) to the 16-bit
type first: results may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def load_silu_and_mul() -> Callable[[Tensor], Tensor]:
    """The function `activation.silu_and_mul`, for bf16 and fp16; its first call compiles it.

    Raises:
        ModuleNotFoundError: FlashInfer is not installed.
    """
    from flashinfer.activation import silu_and_mul

    def silu_and_mul_flashinfer(gate_up: Tensor) -> Tensor:
        """gate_up [n, 2 * f], the gate's half first -> silu(gate) * up, [n, f]."""
        if not gate_up.shape[0]:  # an empty grid is an error
            return gate_up.new_empty((0, gate_up.shape[1] // 2))
        # The kernel takes rows to lie behind one another and does not look at strides.
        product: Tensor = silu_and_mul(gate_up.contiguous())
        return product

    return silu_and_mul_flashinfer
