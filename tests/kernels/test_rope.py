from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relaykv.kernels.rope import (
    apply_rope,
    cos_sin,
    inverse_frequencies,
    llama3_inverse_frequencies,
    rotate_keys,
)

THETAS = [10_000.0, 100_000.0, 1_000_000.0]


def random_keys(n: int, head_dim: int = 64) -> Tensor:
    return torch.randn(n, 3, head_dim, generator=torch.Generator().manual_seed(n))


def position_range(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, dtype=torch.int64)


def test_rotation_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # pairs are (0, 2) and (1, 3)
    angles = torch.tensor([0.5, 0.25], dtype=torch.float64)
    out = apply_rope(x, *cos_sin(angles, torch.tensor([2])))
    c, s = torch.cos(2 * angles).float(), torch.sin(2 * angles).float()
    expected = [1 * c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + 1 * s[0], 4 * c[1] + 2 * s[1]]
    torch.testing.assert_close(out[0, 0], torch.stack(expected))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("shift", [1, 16, -37, 777, 4096, -8000])
def test_shifting_there_and_back_gives_the_original_keys(theta: float, shift: int) -> None:
    inv_freq = inverse_frequencies(theta, 64)
    keys = apply_rope(random_keys(33), *cos_sin(inv_freq, position_range(8000, 8033)))
    there = rotate_keys(keys, *cos_sin(inv_freq, torch.tensor([shift])))
    back = rotate_keys(there, *cos_sin(inv_freq, torch.tensor([-shift])))
    assert (back - keys).abs().max() <= 1e-5
    assert (there - keys).abs().max() > 0.1


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("shift", [1, -5, 100, 3000, -4000])
def test_rope_at_p_then_a_shift_equals_rope_at_the_new_position(theta: float, shift: int) -> None:
    inv_freq = inverse_frequencies(theta, 64)
    positions = position_range(4000, 8192)[::61]
    raw = random_keys(len(positions))
    shifted = rotate_keys(
        apply_rope(raw, *cos_sin(inv_freq, positions)), *cos_sin(inv_freq, torch.tensor([shift]))
    )
    fresh = apply_rope(raw, *cos_sin(inv_freq, positions + shift))
    assert (shifted - fresh).abs().max() <= 1e-5


def test_a_shift_of_zero_changes_no_bit() -> None:
    keys = random_keys(5)
    moved = rotate_keys(keys, *cos_sin(inverse_frequencies(1e5, 64), torch.tensor([0])))
    assert torch.equal(moved, keys)


def test_one_shift_for_all_equals_the_same_shift_for_each() -> None:
    inv_freq, keys = inverse_frequencies(1e5, 64), random_keys(7)
    cos, sin = cos_sin(inv_freq, torch.full((7,), -12))
    assert torch.equal(rotate_keys(keys, cos[0], sin[0]), rotate_keys(keys, cos, sin))


def test_dimensions_behind_the_rotary_ones_are_left_alone() -> None:
    keys = random_keys(4)
    cos, sin = cos_sin(inverse_frequencies(1e4, 32), position_range(10, 14))
    out = apply_rope(keys, cos, sin)
    assert torch.equal(out[..., 32:], keys[..., 32:])
    assert torch.equal(out[..., :32], apply_rope(keys[..., :32], cos, sin))


def test_bf16_is_rotated_in_fp32_and_rounded_once() -> None:
    keys = random_keys(9).bfloat16()
    cos, sin = cos_sin(inverse_frequencies(1e4, 64), position_range(0, 9))
    assert torch.equal(apply_rope(keys, cos, sin), apply_rope(keys.float(), cos, sin).bfloat16())


def test_frequencies_equal_those_of_transformers() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = inverse_frequencies(500_000.0, 128)
    scaled = llama3_inverse_frequencies(plain, 8.0, 1.0, 4.0, 8192)
    torch.testing.assert_close(scaled.float(), expected, rtol=1e-5, atol=0)
    assert not torch.equal(scaled, plain)
