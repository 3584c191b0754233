from __future__ import annotations

import pytest
import torch

from relaykv.kernels.add_offset import add_offset
from relaykv.kernels.rope import apply_rope, cos_sin, inverse_frequencies, rotate_keys

NUM_SLOTS = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_equals_a_naive_loop_over_tokens_and_layers(
    num_tokens: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    k, v = torch.randn(2, 3, NUM_SLOTS, 3, 64, generator=generator).to(dtype)
    offsets = torch.randn(5, 2, 3, 3, 64, generator=generator)
    target = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
    segment = torch.arange(num_tokens) % 2
    index = torch.tensor([4, 2])
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([700, 41]))
    expected = k.clone(), v.clone()
    for token, slot in enumerate(target.tolist()):
        number = token % 2
        keys, values = offsets[index[number]]
        for layer in range(3):
            turned = rotate_keys(0.5 * keys[None, layer], cos[number], sin[number])[0]
            expected[0][layer, slot] = (k[layer, slot].float() + turned).to(dtype)
            expected[1][layer, slot] = (v[layer, slot].float() + 0.5 * values[layer]).to(dtype)
    add_offset(k, v, offsets, index, target, segment, cos, sin, 0.5)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


def test_an_offset_means_the_same_wherever_the_segment_stands() -> None:
    inv_freq = inverse_frequencies(1e4, 64)
    generator = torch.Generator().manual_seed(1)
    raw, lack = torch.randn(2, 1, 6, 2, 64, generator=generator)  # [layers, tokens, heads, dim]
    offsets = torch.zeros(1, 2, 1, 2, 64)
    offsets[0, 0, 0] = lack[0, 0]
    for start in (0, 5, 900):
        turn = cos_sin(inv_freq, torch.tensor([start]))
        k = rotate_keys(raw[0], *(part[0] for part in turn))[None]
        add_offset(
            k,
            torch.zeros_like(k),
            offsets,
            torch.tensor([0]),
            torch.arange(6),
            torch.zeros(6, dtype=torch.int64),
            *turn,
            1.0,
        )
        expected = apply_rope(raw[0] + lack[0, 0], *cos_sin(inv_freq, torch.full((6,), start)))
        torch.testing.assert_close(k[0], expected, rtol=0, atol=2e-6)
