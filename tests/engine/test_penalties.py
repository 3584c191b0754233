from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from relaykv.engine.batch import SamplingRow
from relaykv.engine.penalties import PenaltyCounts
from relaykv.engine.request import SamplingParams
from relaykv.engine.sampler import Sampler

_VOCAB_SIZE = 30


def _row(
    request_id: str, prompt: Sequence[int], output: Sequence[int], repetition: float = 1.2
) -> SamplingRow:
    params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=repetition)
    return SamplingRow(params, 0, prompt, output, request_id)


def _count(counts: PenaltyCounts, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, int]:
    """Counts in prompts and outputs, and how many tokens were counted for it."""
    new = counts.find_new(rows, _VOCAB_SIZE)
    prompt_counts, output_counts = counts.count(new, torch.from_numpy(new.places))
    return prompt_counts, output_counts, new.places.size


def _bincounts(sequences: Sequence[Sequence[int]]) -> Tensor:
    ids = [torch.tensor(list(sequence), dtype=torch.int64) for sequence in sequences]
    return torch.stack([part.bincount(minlength=_VOCAB_SIZE).float() for part in ids])


def _check(counts: PenaltyCounts, rows: Sequence[SamplingRow]) -> int:
    prompts, outputs, num_counted = _count(counts, rows)
    assert torch.equal(prompts, _bincounts([row.prompt_token_ids for row in rows]))
    assert torch.equal(outputs, _bincounts([row.output_token_ids for row in rows]))
    return num_counted


def test_a_prompt_is_counted_once_and_then_only_what_is_new() -> None:
    counts = PenaltyCounts()
    prompt, output = tuple(range(20)), [3, 3]
    assert _check(counts, [_row("a", prompt, output)]) == 22
    assert _check(counts, [_row("a", prompt, output)]) == 0
    assert _check(counts, [_row("a", prompt, [*output, 3])]) == 1
    assert _check(counts, [_row("a", tuple(range(20)), [*output, 3, 5, 6, 7])]) == 3


def test_requests_come_and_go_and_change_places() -> None:
    counts = PenaltyCounts()
    a, b, c = _row("a", (1, 1), (2,)), _row("b", (3,), (3, 3)), _row("c", (), ())
    assert _check(counts, [a, b]) == 6
    assert _check(counts, [b, c, a]) == 0
    assert _check(counts, [c, b]) == 0
    assert _check(counts, [a, b]) == 3  # counted again: it was gone for a step


def test_what_does_not_fit_is_counted_again() -> None:
    counts = PenaltyCounts()
    _check(counts, [_row("a", (1, 2), (5, 6, 7))])
    assert _check(counts, [_row("a", (1, 2), (5, 6))]) == 4  # shorter
    assert _check(counts, [_row("a", (1, 2), (5, 9))]) == 4  # other tokens
    assert _check(counts, [_row("a", (1, 3), (5, 9))]) == 4  # another prompt


def test_a_failed_step_leaves_no_half_counted_request() -> None:
    counts = PenaltyCounts()
    rows = [_row("a", (1,), (2,))]
    _check(counts, rows)
    counts.find_new([_row("a", (1,), (2, 3))], _VOCAB_SIZE)  # and its upload fails
    assert _check(counts, [_row("a", (1,), (2, 3))]) == 3


def test_the_prompt_counts_for_the_repetition_penalty_only() -> None:
    prompts, outputs, num_counted = _count(
        PenaltyCounts(), [_row("a", (1, 2, 3), (4,), repetition=1.0)]
    )
    assert num_counted == 1
    assert not prompts.any()
    assert outputs[0].tolist() == [float(i == 4) for i in range(_VOCAB_SIZE)]


@pytest.mark.parametrize("token_id", [-1, _VOCAB_SIZE])
def test_a_token_that_has_no_logit_is_refused(token_id: int) -> None:
    with pytest.raises(IndexError, match="30 of the model"):
        PenaltyCounts().find_new([_row("a", (), (token_id,))], _VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(8))
def test_a_sampler_with_a_past_samples_as_one_without(seed: int) -> None:
    chance = random.Random(seed)
    sampler = Sampler()
    outputs: dict[str, list[int]] = {}
    for _ in range(25):
        rows = []
        for request_id in chance.sample("abcdef", chance.randint(1, 5)):
            output = outputs.setdefault(request_id, [])
            output += chance.choices(range(_VOCAB_SIZE), k=chance.randint(0, 3))
            if chance.random() < 0.1:
                del output[chance.randint(0, len(output)) :]
            number = ord(request_id)
            penalties: dict[str, Any] = {
                "repetition_penalty": [1.0, 1.3][number % 2],
                "frequency_penalty": [0.0, 0.2, -0.4][number % 3],
                "presence_penalty": 0.5,
            }
            params = SamplingParams(max_tokens=9, temperature=number % 2, **penalties)
            prompt = tuple(range(number - 90))
            rows.append(SamplingRow(params, number, prompt, tuple(output), request_id))
        logits = torch.randn(len(rows), _VOCAB_SIZE)
        assert sampler.sample(logits, rows) == Sampler().sample(logits, rows)
