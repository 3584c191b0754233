from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relaykv.kernels.rope import cos_sin, inverse_frequencies, rotate_keys
from relaykv.kernels.segment_offset import segment_offset

INV_FREQ = inverse_frequencies(1e4, 64)


def _turned(k: Tensor, position: int) -> Tensor:
    cos, sin = cos_sin(INV_FREQ, torch.tensor([position]))
    return rotate_keys(k, cos[0], sin[0])


def _planted(
    num_tokens: int, key: Tensor, value: Tensor, noise: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A cache with a recording at position 7 and what was computed of it at position 90.

    Args:
        key, value: what was computed lacks over the recording, [L, Hkv, D]; keys at position 0.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (key.shape[0], num_tokens, *key.shape[1:])
    raw, v = torch.randn(2, *shape, generator=generator)
    spread = noise * torch.randn(2, *shape, generator=generator)
    k_cache, v_cache = torch.zeros(2, key.shape[0], 2 * num_tokens, *key.shape[1:])
    slots = torch.randperm(2 * num_tokens, generator=generator)
    source, target = slots[:num_tokens], slots[num_tokens:]
    k_cache[:, source], v_cache[:, source] = _turned(raw, 7), v
    k_cache[:, target] = _turned(raw + key[:, None] + spread[0], 90)
    v_cache[:, target] = v + value[:, None] + spread[1]
    return k_cache, v_cache, source, target


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 600])
def test_a_planted_offset_is_found_whatever_the_positions(num_tokens: int) -> None:
    key, value = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    planted = _planted(num_tokens, key, value)
    cos, sin = cos_sin(INV_FREQ, torch.tensor([-7, -90]))
    found = segment_offset(*planted, cos, sin)
    torch.testing.assert_close(found.mean, torch.stack((key, value)), rtol=0, atol=1e-5)
    expected = num_tokens * torch.stack((key, value)).square().flatten(1).sum(1)
    torch.testing.assert_close(found.energy, expected, rtol=1e-4, atol=0)
    assert found.num_tokens == num_tokens
    left = found.energy_without(torch.stack((key, value)))
    assert (left < 1e-4 * expected).all()


def test_what_an_offset_leaves_is_what_taking_it_off_every_token_leaves() -> None:
    key, value, other = torch.randn(3, 2, 1, 64, generator=torch.Generator().manual_seed(4))
    k, v, source, target = _planted(40, key, value, noise=0.7)
    cos, sin = cos_sin(INV_FREQ, torch.tensor([-7, -90]))
    found = segment_offset(k, v, source, target, cos, sin)
    offset = torch.stack((other, 0.5 * value))
    keys = _turned(k[:, target], -90) - _turned(k[:, source], -7) - offset[0, :, None]
    values = v[:, target] - v[:, source] - offset[1, :, None]
    expected = torch.stack((keys.square().sum(), values.square().sum()))
    torch.testing.assert_close(found.energy_without(offset), expected, rtol=1e-4, atol=0)
