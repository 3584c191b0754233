from __future__ import annotations

import pytest
import torch

from relaykv.kernels.add_anchored import add_anchored
from relaykv.kernels.rope import apply_rope, cos_sin, inverse_frequencies, rotate_keys
from relaykv.kernels.store_offset import store_offset

NUM_SLOTS = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_equals_a_naive_loop_over_tokens_and_layers(
    num_tokens: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    k, v = torch.randn(2, 3, NUM_SLOTS, 2, 64, generator=generator).to(dtype)
    slots = torch.randperm(NUM_SLOTS, generator=generator)
    target, others = slots[:num_tokens], slots[num_tokens:]
    chosen = torch.randint(0, len(others), (num_tokens, 3), generator=generator)
    offsets = others[chosen]
    offsets[::4, 1] = -1
    weights = torch.rand(num_tokens, 3, generator=generator)
    segment = torch.arange(num_tokens) % 2
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([700, 41]))
    expected = k.clone(), v.clone()
    for token, slot in enumerate(target.tolist()):
        key, value = torch.zeros(2, 3, 2, 64)
        for other, weight in zip(offsets[token].tolist(), weights[token], strict=True):
            if other >= 0:
                key += weight * k[:, other].float()
                value += weight * v[:, other].float()
        key = rotate_keys(key, cos[token % 2], sin[token % 2])
        expected[0][:, slot] = (k[:, slot].float() + key).to(dtype)
        expected[1][:, slot] = (v[:, slot].float() + value).to(dtype)
    add_anchored(k, v, offsets, weights, target, segment, cos, sin)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


def test_a_stored_offset_added_in_another_place_gives_what_was_computed_there() -> None:
    """One text: recorded at 30, computed at 5, relayed to 900."""
    inv_freq = inverse_frequencies(1e4, 48)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.zeros(2, 2, NUM_SLOTS, 2, 64)
    recorded, computed = torch.randn(2, 2, 2, 10, 2, 64, generator=generator)  # keys and values
    source, target, place, again = torch.randperm(NUM_SLOTS)[:40].view(4, 10)

    def turned(keys: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = cos_sin(inv_freq, torch.arange(start, start + 10))
        return torch.stack([apply_rope(layer, cos, sin) for layer in keys])

    k[:, source], v[:, source] = turned(recorded[0], 30), recorded[1]
    k[:, target], v[:, target] = turned(computed[0], 5), computed[1]
    k[:, again], v[:, again] = turned(recorded[0], 900), recorded[1]
    store_offset(k, v, source, target, place, *cos_sin(inv_freq, torch.tensor([-30, -5])))
    add_anchored(
        k,
        v,
        place[:, None],
        torch.ones(10, 1),
        again,
        torch.zeros(10, dtype=torch.int64),
        *cos_sin(inv_freq, torch.tensor([900])),
    )
    torch.testing.assert_close(k[:, again], turned(computed[0], 900), rtol=0, atol=1e-5)
    torch.testing.assert_close(v[:, again], computed[1], rtol=0, atol=1e-6)
