"""Rotary position embedding, half-split (NeoX) layout, and re-rotation of cached keys.

A key that was rotated for position p and is rotated again by s equals the key rotated for
p + s: that is what lets a cached key move to another position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Plain RoPE's angle per position, fp64 [rotary_dim / 2], on the CPU."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return theta**-exponent


def llama3_inverse_frequencies(
    inv_freq: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_len: int,
) -> Tensor:
    """Scales plain frequencies as Llama 3.1 does: long wavelengths by 1 / factor, short ones not.

    Args:
        inv_freq: fp64 [r / 2] from `inverse_frequencies`.
        factor: how much the context was stretched.
        low_freq_factor: wavelengths above original_max_len / low_freq_factor are divided.
        high_freq_factor: wavelengths below original_max_len / high_freq_factor are kept; those
            between the two are interpolated.
        original_max_len: context length before stretching, in tokens.

    Returns:
        fp64 [r / 2].
    """
    num_turns = original_max_len * inv_freq / (2 * math.pi)  # over the original context
    smooth = (num_turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)  # 0: scaled, 1: kept
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def cos_sin(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions or shifts.

    The angles are fp64: in fp32 an angle of thousands of radians has lost the digits that
    make shifting there and back exact.

    Args:
        inv_freq: fp64 [r / 2].
        positions: int64 [n]; negative ones are allowed, as shifts.

    Returns:
        cos and sin, fp32 [n, r / 2].
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * inv_freq
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first r dimensions of every head; the others stay as they are.

    Args:
        x: [n, H, D] queries or keys.
        cos: fp32 [n, r / 2], r <= D.
        sin: fp32 [n, r / 2].

    Returns:
        A new [n, H, D] in the dtype of `x`; the arithmetic is fp32.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [n, 1, r / 2]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotate_keys(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Moves keys that are already rotated for their position by a shift.

    Args:
        k: [n, Hkv, D] cached keys.
        cos: fp32 [r / 2] when all keys move by the same shift, else [n, r / 2].
        sin: like `cos`.

    Returns:
        A new [n, Hkv, D] in the dtype of `k`.
    """
    return apply_rope(k, cos, sin)
