"""`shift_copy` in Triton against its twin; `test_triton_interpreter.py` runs these."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from relaykv.kernels.rope import cos_sin, inverse_frequencies
from relaykv.kernels.shift_copy import shift_copy
from relaykv.kernels.shift_copy_triton import shift_copy_triton

NUM_SLOTS = 48
SHAPES = [  # layers, kv heads, head dim, rotary dim, hidden size
    (1, 1, 64, 64, 64),
    (2, 3, 64, 64, 576),
    (1, 2, 128, 64, 1030),
    (2, 3, 96, 24, 100),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_it_leaves_the_bits_that_plain_torch_leaves(
    num_tokens: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    num_layers, num_kv_heads, head_dim, rotary_dim, hidden_size = shape
    k, v = torch.randn(2, num_layers, NUM_SLOTS, num_kv_heads, head_dim).to(dtype)
    hidden, influence = torch.randn(NUM_SLOTS, hidden_size).to(dtype), torch.randn(NUM_SLOTS)
    slots = torch.randperm(NUM_SLOTS)
    source, target = slots[:num_tokens], slots[num_tokens : 2 * num_tokens]
    if num_tokens > 1:
        source[1] = source[0]  # one recording stands twice in a prompt
    # The second segment, of a few tokens, moves back.
    segment = (torch.arange(num_tokens) >= num_tokens - 3).long()
    cos, sin = cos_sin(inverse_frequencies(1e4, rotary_dim), torch.tensor([1900, -37]))
    found = k.clone(), v.clone(), hidden.clone(), influence.clone()
    shift_copy(k, v, hidden, influence, source, target, segment, cos, sin)
    shift_copy_triton(*found, source, target, segment, cos, sin)
    for expected, tensor in zip((k, v, hidden, influence), found, strict=True):
        assert torch.equal(tensor, expected)


def test_a_layer_beyond_two_to_the_31_elements_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the pages that are touched take memory, if the interpreter does not copy all back.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    memory = torch.empty(2**31 + 2**20, dtype=torch.float16)
    shape, strides = (3, 8, 1, 64), (2**30 + 2**10, 64, 64, 1)
    k = memory.as_strided(shape, strides)
    v = memory.as_strided(shape, strides, storage_offset=2**12)
    k[:] = torch.randn(shape)
    v[:] = torch.randn(shape)
    hidden, influence = torch.randn(8, 16), torch.randn(8)
    source, target, segment = torch.tensor([1]), torch.tensor([6]), torch.tensor([0])
    cos, sin = cos_sin(inverse_frequencies(1e4, 64), torch.tensor([5]))
    expected = k.clone(), v.clone(), hidden.clone(), influence.clone()
    shift_copy(*expected, source, target, segment, cos, sin)
    shift_copy_triton(k, v, hidden, influence, source, target, segment, cos, sin)
    for tensor, wanted in zip((k, v, hidden, influence), expected, strict=True):
        assert torch.equal(tensor, wanted)
