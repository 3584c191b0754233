from __future__ import annotations

import pytest
import torch

from relaykv.kernels.rope import cos_sin, inverse_frequencies, rotate_keys
from relaykv.kernels.store_offset import store_offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 300])
def test_it_equals_a_naive_loop_over_tokens(num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_slots = 3 * max(num_tokens, 1) + 2
    k, v = torch.randn(2, 2, num_slots, 3, 16, generator=generator).to(dtype)
    slots = torch.randperm(num_slots, generator=generator)[: 3 * num_tokens]
    source, target, place = slots.view(3, num_tokens)
    cos, sin = cos_sin(inverse_frequencies(1e4, 12), torch.tensor([-9, -120]))
    expected = k.clone(), v.clone()
    for old, new, kept in zip(source.tolist(), target.tolist(), place.tolist(), strict=True):
        before = rotate_keys(k[:, old].float(), cos[0], sin[0])
        after = rotate_keys(k[:, new].float(), cos[1], sin[1])
        expected[0][:, kept] = (after - before).to(dtype)
        expected[1][:, kept] = (v[:, new].float() - v[:, old].float()).to(dtype)
    store_offset(k, v, source, target, place, cos, sin)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])
