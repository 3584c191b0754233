"""`add_anchored` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.add_anchored import add_anchored
from relaykv.kernels.add_anchored_triton import add_anchored_triton
from relaykv.kernels.rope import cos_sin, inverse_frequencies

NUM_SLOTS = 64
SHAPES = [(1, 1, 64, 64), (1, 2, 128, 64), (2, 3, 96, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_tokens", "num_anchors"), [(0, 2), (1, 1), (17, 3)])
def test_it_leaves_the_bits_that_plain_torch_leaves(
    num_tokens: int, num_anchors: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_layers, num_kv_heads, head_dim, rotary_dim = shape
    k, v = torch.randn(2, num_layers, NUM_SLOTS, num_kv_heads, head_dim).to(dtype)
    slots = torch.randperm(NUM_SLOTS)
    target, others = slots[:num_tokens], slots[num_tokens:]
    offsets = others[torch.randint(0, len(others), (num_tokens, num_anchors))]
    offsets = offsets.masked_fill(torch.rand(offsets.shape) < 0.2, -1)
    weights = torch.randn(num_tokens, num_anchors).softmax(dim=1)
    segment = (torch.arange(num_tokens) >= num_tokens - 3).long()
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([1900, 12]))
    found = k.clone(), v.clone()
    add_anchored(k, v, offsets, weights, target, segment, cos, sin)
    add_anchored_triton(*found, offsets, weights, target, segment, cos, sin)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
