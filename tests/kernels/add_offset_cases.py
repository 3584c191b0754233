"""`add_offset` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.add_offset import add_offset
from relaykv.kernels.add_offset_triton import add_offset_triton
from relaykv.kernels.rope import cos_sin, inverse_frequencies

NUM_SLOTS = 48
SHAPES = [(1, 1, 64, 64), (2, 3, 64, 64), (1, 2, 128, 64), (2, 3, 96, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_leaves_the_bits_that_plain_torch_leaves(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_layers, num_kv_heads, head_dim, rotary_dim = shape  # layers, kv heads, ...
    k, v = torch.randn(2, num_layers, NUM_SLOTS, num_kv_heads, head_dim).to(dtype)
    offsets = torch.randn(4, 2, num_layers, num_kv_heads, head_dim)
    target = torch.randperm(NUM_SLOTS)[:num_tokens]
    segment = (torch.arange(num_tokens) >= num_tokens - 3).long()
    index = torch.tensor([3, 1])
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([1900, 12]))
    found = k.clone(), v.clone()
    add_offset(k, v, offsets, index, target, segment, cos, sin, 0.8)
    add_offset_triton(*found, offsets, index, target, segment, cos, sin, 0.8)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
