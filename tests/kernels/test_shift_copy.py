from __future__ import annotations

import pytest
import torch

from relaykv.kernels.rope import apply_rope, cos_sin, inverse_frequencies, rotate_keys
from relaykv.kernels.shift_copy import shift_copy

NUM_SLOTS = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_equals_a_naive_loop_over_tokens_and_layers(
    num_tokens: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    k, v = torch.randn(2, 3, NUM_SLOTS, 3, 64, generator=generator).to(dtype)
    hidden = torch.randn(NUM_SLOTS, 40, generator=generator).to(dtype)
    influence = torch.randn(NUM_SLOTS, generator=generator)
    slots = torch.randperm(NUM_SLOTS, generator=generator)
    source, target = slots[:num_tokens], slots[num_tokens : 2 * num_tokens]
    segment = torch.arange(num_tokens) % 2
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([700, -41]))
    expected = [x.clone() for x in (k, v, hidden, influence)]
    for index, (old, new) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        for layer in range(3):
            key = k[layer, old : old + 1]
            expected[0][layer, new] = rotate_keys(key, cos[index % 2], sin[index % 2])[0]
            expected[1][layer, new] = v[layer, old]
        expected[2][new] = hidden[old]
        expected[3][new] = influence[old]
    shift_copy(k, v, hidden, influence, source, target, segment, cos, sin)
    for found, wanted in zip((k, v, hidden, influence), expected, strict=True):
        assert torch.equal(found, wanted)


def test_moved_keys_are_those_of_their_new_positions() -> None:
    inv_freq = inverse_frequencies(1e4, 64)
    raw = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(20)
    shifts = torch.tensor([5000, -7])
    segment = (positions >= 12).long()
    k = torch.zeros(1, 40, 2, 64)
    k[0, :20] = apply_rope(raw, *cos_sin(inv_freq, positions))
    v, hidden, influence = torch.zeros(1, 40, 2, 64), torch.zeros(40, 8), torch.zeros(40)
    shift_copy(
        k, v, hidden, influence, positions, positions + 20, segment, *cos_sin(inv_freq, shifts)
    )
    expected = apply_rope(raw, *cos_sin(inv_freq, positions + shifts[segment]))
    torch.testing.assert_close(k[0, 20:], expected, rtol=0, atol=2e-6)


def test_a_shift_of_nothing_keeps_the_bits() -> None:
    k = torch.randn(2, 8, 1, 16).bfloat16()
    v, hidden, influence = torch.zeros(2, 8, 1, 16).bfloat16(), torch.zeros(8, 4), torch.zeros(8)
    cos, sin = cos_sin(inverse_frequencies(1e4, 16), torch.tensor([0]))
    source, target = torch.tensor([1, 2, 1]), torch.tensor([5, 6, 7])
    shift_copy(k, v, hidden, influence, source, target, torch.zeros_like(source), cos, sin)
    assert torch.equal(k[:, target], k[:, source])
