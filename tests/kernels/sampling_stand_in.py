"""FlashInfer's real sampling functions on CPU tensors, with only the compiled module replaced.

The module's one function checks its raw arguments against what `top_k_mask_logits` of `renorm.cu`
and its kernel in `topk.cuh` take for granted (FlashInfer 0.7.4), then computes the result in torch.
No kernel runs: what a device computes is not shown by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import flashinfer.sampling
import torch
from torch import Tensor

_ROW_STATES_BYTES = 1 << 20


@contextmanager
def sampling_stand_in() -> Iterator[list[str]]:
    """Yields what has been done so far: "build", then the names of the functions called."""
    done: list[str] = []

    def build_and_load() -> SimpleNamespace:
        done.append("build")
        return SimpleNamespace(top_k_mask_logits=top_k_mask_logits)

    def top_k_mask_logits(
        logits: Tensor, out: Tensor, top_k: Tensor, top_k_val: int, row_states: Tensor
    ) -> None:
        done.append("top_k_mask_logits")
        assert top_k_val == 0, "the value beside an array of them"
        _check(logits, out, top_k, row_states)
        for row, k, masked in zip(logits, top_k.tolist(), out, strict=True):
            pivot = row.sort(descending=True).values[min(k, row.numel()) - 1]
            keeps = row >= pivot if k < row.numel() else torch.ones_like(row, dtype=torch.bool)
            masked.copy_(row.masked_fill(~keeps, float("-inf")))

    spec = SimpleNamespace(build_and_load=build_and_load)
    row_states = torch.zeros(_ROW_STATES_BYTES, dtype=torch.uint8)
    module = flashinfer.sampling
    with (
        mock.patch.object(module, "gen_sampling_module", return_value=spec),
        mock.patch.object(module, "_get_row_states_buffer", return_value=row_states),
    ):
        module.get_sampling_module.cache_clear()
        try:
            yield done
        finally:
            module.get_sampling_module.cache_clear()


def _check(logits: Tensor, out: Tensor, top_k: Tensor, row_states: Tensor) -> None:
    assert logits.ndim == 2
    assert logits.shape[0] > 0, "an empty grid"
    assert logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert logits.is_contiguous()
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (logits.shape, logits.dtype)
    assert out.data_ptr() != logits.data_ptr()
    # Read as int32 whatever the type is, one per row, k - 1 as an unsigned number.
    assert top_k.dtype is torch.int32
    assert top_k.shape == logits.shape[:1]
    assert top_k.is_contiguous()
    assert int(top_k.min()) >= 1
    assert row_states.numel() >= _ROW_STATES_BYTES
    assert not row_states.any(), "the counters of groups must be zero between launches"
