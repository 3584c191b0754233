"""Each function of kernels/sampling.py against a slow one that can be read at a glance."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from relaykv.kernels.sampling import (
    apply_logit_bias,
    apply_penalties,
    apply_temperature,
    apply_token_mask,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    filter_top_p_probing,
    sample_from_probs,
    top_logprobs,
    unpack_bits,
)

_NUM_ROWS = 5

top_p_filters = pytest.mark.parametrize("filter_", [filter_top_p, filter_top_p_probing])


TopP = Callable[[Tensor, Tensor, int], Tensor]


def _logits(vocab_size: int, scale: float = 3.0, rounded: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(_NUM_ROWS, vocab_size, generator=generator) * scale
    return logits.round() if rounded else logits  # rounding makes many ties


def _kept(logits: Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def _ranking(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda token_id: (-float(row[token_id]), token_id))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 7, 300])
def test_top_k_keeps_the_greatest_and_of_equal_ones_the_lowest_ids(
    vocab_size: int, rounded: bool
) -> None:
    logits = _logits(vocab_size, rounded=rounded)
    top_k = torch.tensor([1, 2, 5, 40, 10_000])
    expected = [set(_ranking(row)[: int(k)]) for row, k in zip(logits, top_k, strict=True)]
    result = filter_top_k(logits, top_k, 10_000)
    assert _kept(result) == expected
    assert torch.equal(result[torch.isfinite(result)], logits[torch.isfinite(result)])


@pytest.mark.parametrize(("vocab_size", "scale"), [(1, 1.0), (7, 3.0), (300, 3.0), (3000, 0.2)])
@pytest.mark.parametrize("rounded", [False, True])
@top_p_filters
def test_top_p_keeps_the_smallest_nucleus(
    filter_: TopP, vocab_size: int, scale: float, rounded: bool
) -> None:
    logits = _logits(vocab_size, scale, rounded)
    top_p = torch.tensor([0.0, 0.1, 0.5, 0.93, 0.999], dtype=torch.float64)
    expected = []
    for row, limit in zip(logits, top_p.tolist(), strict=True):
        probs = row.double().softmax(dim=-1).tolist()
        kept, mass = set(), 0.0
        for token_id in _ranking(row):
            kept.add(token_id)
            mass += probs[token_id]
            if mass >= limit:
                break
        expected.append(kept)
    for actual, wanted in zip(_kept(filter_(logits, top_p, vocab_size)), expected, strict=True):
        # fp32 probabilities may move the border by a token of a flat distribution.
        assert len(actual ^ wanted) <= (2 if vocab_size > 1000 else 0)


@top_p_filters
def test_top_p_reaches_tokens_behind_those_it_looks_at_first(filter_: TopP) -> None:
    logits = torch.zeros(1, 5000)
    result = filter_(logits, torch.tensor([0.5], dtype=torch.float64), 5000)
    assert _kept(result) == [set(range(2500))]


@top_p_filters
def test_top_p_after_top_k_counts_the_kept_tokens_only(filter_: TopP) -> None:
    logits = torch.tensor([[4.0, 3.0, 3.0, 0.0]]).log()  # probabilities 0.4, 0.3, 0.3 and 0
    top_p = torch.tensor([0.55], dtype=torch.float64)
    both = filter_(filter_top_k(logits, torch.tensor([2]), 2), top_p, 2)
    assert _kept(both) == [{0}]  # 0.4 of 0.7 is 0.57
    alone = filter_(logits, top_p, 4)
    assert _kept(alone) == [{0, 1}]


@pytest.mark.parametrize(("vocab_size", "scale"), [(7, 3.0), (1025, 0.2), (3000, 3.0), (3000, 0.1)])
@pytest.mark.parametrize("rounded", [False, True])
def test_both_ways_to_top_p_give_the_same_bits_and_so_does_a_tighter_bound(
    vocab_size: int, scale: float, rounded: bool
) -> None:
    top_p = torch.tensor([0.0, 0.3, 0.9, 0.999, 1 - 2.0**-53], dtype=torch.float64)
    logits = _logits(vocab_size, scale, rounded)
    for bound in (6, vocab_size):
        limited = filter_top_k(logits, torch.full((_NUM_ROWS,), bound), bound)
        sorted_ = filter_top_p(limited, top_p, vocab_size)
        assert torch.equal(filter_top_p(limited, top_p, bound), sorted_)
        assert torch.equal(filter_top_p_probing(limited, top_p, bound), sorted_)


@pytest.mark.parametrize("vocab_size", [1, 300])
def test_min_p_drops_what_is_much_less_likely_than_the_best(vocab_size: int) -> None:
    logits = _logits(vocab_size)
    min_p = torch.tensor([0.0, 0.01, 0.2, 0.9, 1.0])
    expected = []
    for row, share in zip(logits, min_p.tolist(), strict=True):
        probs = row.double().softmax(dim=-1)
        floor = share * float(probs.max()) * (1 - 1e-6)
        expected.append(set((probs >= floor).nonzero().flatten().tolist()))
    assert _kept(filter_min_p(logits, min_p)) == expected


def test_penalties_change_only_tokens_that_have_occurred() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 3.0]])
    prompt_counts = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]])
    output_counts = torch.tensor([[0.0, 0.0, 3.0, 1.0, 0.0]])
    penalties = torch.tensor([[2.0, 0.25, 0.5]])  # repetition, frequency, presence
    result = apply_penalties(logits, prompt_counts, output_counts, penalties)
    expected = [2.0 / 2, -2.0 * 2, 1.0 / 2 - 3 * 0.25 - 0.5, -1.0 * 2 - 0.25 - 0.5, 3.0]
    assert result.tolist() == [expected]
    assert logits.tolist() == [[2.0, -2.0, 1.0, -1.0, 3.0]]


def test_penalties_of_a_row_are_its_own() -> None:
    logits = torch.ones(2, 3)
    counts = torch.ones(2, 3)
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
    result = apply_penalties(logits, torch.zeros(2, 3), counts, penalties)
    assert result.tolist() == [[1.0] * 3, [0.5] * 3]


def test_logit_bias_is_added_to_its_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    result = apply_logit_bias(logits, torch.tensor([2, 0, 4]), torch.tensor([-100.0, 0.5, 9.0]))
    assert result.tolist() == [[1.5, 2.0, -97.0], [4.0, 14.0, 6.0]]
    assert logits.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize("num_bits", [1, 8, 13, 16])
def test_bits_are_unpacked_lowest_first(num_bits: int) -> None:
    packed = [[0b10110001, 0b01000001], [0, 255]]
    expected = [[bool(row[i // 8] >> i % 8 & 1) for i in range(num_bits)] for row in packed]
    assert unpack_bits(torch.tensor(packed, dtype=torch.uint8), num_bits).tolist() == expected


def test_a_token_mask_keeps_what_is_allowed_as_it_is() -> None:
    logits = _logits(7)[0]
    allowed = torch.tensor([True, False, True, False, False, True, False])
    masked = apply_token_mask(logits, allowed)
    assert _kept(masked.unsqueeze(0)) == [{0, 2, 5}]
    assert torch.equal(masked[allowed], logits[allowed])
    assert torch.isfinite(logits).all()


def test_temperature_divides_the_differences() -> None:
    logits = _logits(50)
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.1, 7.0])
    result = apply_temperature(logits, temperature).softmax(dim=-1)
    torch.testing.assert_close(result, (logits / temperature[:, None]).softmax(dim=-1))


def test_temperature_close_to_zero_leaves_the_best_token() -> None:
    logits = torch.tensor([[1.0, 50.0, 49.0]])
    probs = apply_temperature(logits, torch.tensor([1e-45])).softmax(dim=-1)
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("number", [0.0, 1e-9, 0.25, 0.2500001, 0.5, 0.75, 1 - 2.0**-53])
def test_draw_inverts_the_cumulative_distribution(number: float) -> None:
    probs = torch.tensor([[0.0, 0.25, 0.25, 0.0, 0.25, 0.25, 0.0]])
    drawn = int(sample_from_probs(probs, torch.tensor([number], dtype=torch.float64)))
    assert drawn == [1, 2, 4, 5][math.floor(number * 4)]


def test_a_draw_from_what_is_not_a_distribution_is_a_token_all_the_same() -> None:
    probs = torch.tensor([[math.nan] * 5, [0.5, math.nan, 0.5, 0.0, 0.0], [math.inf] * 5])
    drawn = sample_from_probs(probs, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert all(0 <= token_id < 5 for token_id in drawn.tolist())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 4, 300])
def test_log_probabilities_come_likeliest_first_and_of_equal_ones_lower_ids(
    num_top: int, rounded: bool
) -> None:
    logits = _logits(300, rounded=rounded)
    token_ids = torch.tensor([0, 299, 7, 7, 100])
    chosen, likeliest, values = top_logprobs(logits, token_ids, num_top)
    expected = logits.log_softmax(dim=-1)
    assert chosen.tolist() == [float(expected[i, t]) for i, t in enumerate(token_ids.tolist())]
    assert likeliest.tolist() == [_ranking(row)[:num_top] for row in expected]
    assert torch.equal(values, expected.gather(-1, likeliest))


def test_a_certain_token_is_the_likeliest() -> None:
    logits = torch.tensor([[-200.0, 0.0, -300.0]])  # log-probabilities -200, 0 and -300
    chosen, likeliest, values = top_logprobs(logits, torch.tensor([1]), 3)
    assert (chosen.tolist(), likeliest.tolist()) == ([0.0], [[1, 0, 2]])
    assert values.tolist() == [[0.0, -200.0, -300.0]]


def test_draw_equals_a_plain_loop() -> None:
    probs = _logits(400).softmax(dim=-1)
    for number in torch.linspace(0, 0.9999, 50, dtype=torch.float64).tolist():
        uniform = torch.full((_NUM_ROWS,), number, dtype=torch.float64)
        for row, drawn in zip(probs.double(), sample_from_probs(probs, uniform), strict=True):
            below = float(row[: int(drawn)].sum())
            assert below - 1e-6 <= number <= below + float(row[int(drawn)]) + 1e-6


@top_p_filters
@pytest.mark.parametrize("vocab_size", [7, 5000])
def test_rows_do_not_influence_one_another(vocab_size: int, filter_: TopP) -> None:
    logits = _logits(vocab_size, scale=0.5)
    top_k = torch.tensor([3, 100, 2, 4000, 50])
    top_p = torch.tensor([0.9, 0.3, 0.99, 0.7, 0.5], dtype=torch.float64)
    uniform = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7], dtype=torch.float64)
    together = (
        filter_top_k(logits, top_k, 4000),
        filter_(logits, top_p, vocab_size),
        sample_from_probs(logits.softmax(dim=-1), uniform),
    )
    for row in range(_NUM_ROWS):
        own = slice(row, row + 1)
        alone = filter_top_k(logits[own], top_k[own], int(top_k[row]))
        assert torch.equal(alone, together[0][own])
        assert torch.equal(filter_(logits[own], top_p[own], vocab_size), together[1][own])
        drawn = sample_from_probs(logits[own].softmax(dim=-1), uniform[own])
        assert torch.equal(drawn, together[2][own])
