"""`anchor_distance` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import pytest
import torch

from relaykv.kernels.anchor_distance import anchor_distance
from relaykv.kernels.anchor_distance_triton import anchor_distance_triton

NUM_SLOTS = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 3, 64), (2, 3, 96)])
@pytest.mark.parametrize(("num_tokens", "num_anchors"), [(0, 2), (1, 1), (17, 3)])
def test_it_finds_the_distances_that_plain_torch_finds(
    num_tokens: int, num_anchors: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_layers, num_kv_heads, head_dim = shape
    v = torch.randn(num_layers, NUM_SLOTS, num_kv_heads, head_dim).to(dtype)
    source = torch.randperm(NUM_SLOTS)[:num_tokens]
    anchors = torch.randint(-1, NUM_SLOTS, (num_tokens, num_anchors))
    expected = anchor_distance(v, source, anchors)
    found = anchor_distance_triton(v, source, anchors)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(found.isinf(), anchors < 0)
