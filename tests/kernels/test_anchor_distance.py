from __future__ import annotations

import math

import pytest
import torch

from relaykv.kernels.anchor_distance import anchor_distance, anchor_weights

NUM_SLOTS = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 300])
def test_it_equals_a_naive_loop_over_tokens_and_anchors(
    num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    v = torch.randn(2, NUM_SLOTS, 3, 8, generator=generator).to(dtype)
    source = torch.randint(0, NUM_SLOTS, (num_tokens,), generator=generator)
    anchors = torch.randint(-1, NUM_SLOTS, (num_tokens, 4), generator=generator)
    found = anchor_distance(v, source, anchors)
    assert found.shape == (num_tokens, 4)
    assert found.dtype is torch.float32
    for token, (slot, row) in enumerate(zip(source.tolist(), anchors.tolist(), strict=True)):
        for number, other in enumerate(row):
            expected = math.inf
            if other >= 0:
                difference = v[:, slot].double() - v[:, other].double()
                expected = float(difference.square().sum())
            assert found[token, number].item() == pytest.approx(expected, rel=1e-5)


def test_a_token_is_no_way_from_itself() -> None:
    v = torch.randn(3, NUM_SLOTS, 2, 16)
    slots = torch.arange(10)
    assert anchor_distance(v, slots, slots[:, None]).count_nonzero() == 0


def test_anchors_as_far_share_evenly_whatever_the_unit() -> None:
    for scale in (1e-6, 1.0, 1e6):
        weights = anchor_weights(torch.tensor([[2.0, 2.0, 2.0, math.inf]]) * scale)
        torch.testing.assert_close(weights, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


def test_a_nearer_anchor_weighs_more_and_the_very_text_weighs_all() -> None:
    weights = anchor_weights(torch.tensor([[1.0, 4.0], [0.0, 0.5], [1e-10, 1.0], [0.0, 0.0]]))
    expected = torch.tensor([[1.0, 2.0], [0.0, math.inf], [1.0, 1e5], [0.0, 0.0]]).neg().softmax(1)
    torch.testing.assert_close(weights, expected)
    assert weights[1].tolist() == [1.0, 0.0]
    assert weights[3].tolist() == [0.5, 0.5]


def test_no_tokens_have_no_weights() -> None:
    assert anchor_weights(torch.empty(0, 3)).shape == (0, 3)
