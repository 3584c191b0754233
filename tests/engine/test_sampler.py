"""Sampling as a caller of the API sees it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from sync_recorder import SyncRecorder
from torch import Tensor

from relaykv.engine.batch import UNKNOWN_TOKEN, SamplingRow
from relaykv.engine.request import GrammarKind, GrammarSpec, SamplingParams
from relaykv.engine.row_subset import share_memory
from relaykv.engine.sampler import Sampler, uniform
from relaykv.kernels.sampling import Filters, filter_top_k, filter_top_p

_VOCAB_SIZE = 500


def _row(
    seed: int = 1, prompt: Sequence[int] = (), output: Sequence[int] = (), **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=64, **params), seed, prompt, output)


def _logits(num_rows: int, vocab_size: int = _VOCAB_SIZE) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7)) * 2


def _token(logits: Sequence[float], row: SamplingRow) -> int:
    return Sampler().sample(torch.tensor([list(logits)]), [row])[0].token_id


def _every_kind_of_row() -> list[SamplingRow]:
    return [
        _row(temperature=0.0),
        _row(temperature=0.0, frequency_penalty=1.0, output=[3, 3, 9]),
        _row(temperature=0.0, num_logprobs=2),
        _row(seed=5),
        _row(seed=6, temperature=0.7, output=[1, 2, 3]),
        _row(seed=7, top_p=0.9),
        _row(seed=8, top_k=20, top_p=0.5, output=[4]),
        _row(seed=9, min_p=0.05, num_logprobs=4),
        _row(seed=10, top_k=3, repetition_penalty=1.3, prompt=[1, 2], output=[3]),
        _row(seed=11, logit_bias=((7, 3.0), (8, -2.5)), presence_penalty=0.5, output=[7]),
        _row(seed=12, top_k=10_000, top_p=0.0),
    ]


def test_a_row_is_sampled_alone_as_in_a_batch() -> None:
    rows = _every_kind_of_row()
    logits = _logits(len(rows))
    together = Sampler().sample(logits, rows)
    alone = [
        Sampler().sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)
    ]
    backwards = Sampler().sample(logits.flip(0), rows[::-1])
    assert together == alone
    assert together == backwards[::-1]


def test_logits_are_left_unchanged() -> None:
    rows = _every_kind_of_row()
    logits = _logits(len(rows))
    before = logits.clone()
    Sampler().sample(logits, rows)
    assert torch.equal(logits, before)


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    def generate(seed: int) -> list[int]:
        output: list[int] = []
        for logits in _logits(30):
            row = _row(seed=seed, output=output)
            output = [*output, Sampler().sample(logits.unsqueeze(0), [row])[0].token_id]
        return output

    assert generate(42) == generate(42)
    assert generate(42) != generate(43)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**200])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1
    assert uniform(seed, 0) != uniform(seed, 1)
    assert 0 <= _token([0.0] * 10, _row(seed=seed)) < 10


def test_neighbouring_seeds_and_indices_share_no_numbers() -> None:
    numbers = {uniform(seed, index) for seed in range(-20, 20) for index in range(50)}
    assert len(numbers) == 40 * 50


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    num_draws = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, float("-inf")])
    rows = [_row(seed=seed) for seed in range(num_draws)]
    drawn = Counter(
        token.token_id for token in Sampler().sample(logits.expand(num_draws, -1), rows)
    )
    expected = logits.softmax(dim=-1) * num_draws
    chi_square = sum((drawn[t] - float(expected[t])) ** 2 / float(expected[t]) for t in range(5))
    assert drawn[5] == 0
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in 1000 times


def test_one_requests_numbers_are_uniform_over_its_output() -> None:
    numbers = [uniform(3, index) for index in range(4000)]
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
    deciles = Counter(math.floor(number * 10) for number in numbers)
    assert all(320 < deciles[decile] < 480 for decile in range(10))


def test_temperature_zero_takes_the_lowest_of_the_best_tokens() -> None:
    assert _token([1.0, 5.0, 5.0, 5.0], _row(temperature=0.0)) == 1
    biased = _row(temperature=0.0, logit_bias=((0, 4.0),))
    assert _token([1.0, 5.0, 5.0, 5.0], biased) == 0


def test_filters_limit_what_can_be_drawn() -> None:
    logits = [3.0, 2.9, 2.8, 0.0, -5.0]
    cases: dict[str, Any] = {"top_k": 2, "top_p": 0.5, "min_p": 0.85}
    for name, value in cases.items():
        drawn = {_token(logits, _row(seed=seed, **{name: value})) for seed in range(200)}
        assert drawn == {0, 1}, name


def test_frequency_and_presence_penalties_look_at_the_output_only() -> None:
    logits = [1.0, 0.9, 0.0]
    penalties: list[dict[str, Any]] = [{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}]
    for penalty in penalties:
        assert _token(logits, _row(temperature=0.0, prompt=[0], **penalty)) == 0
        assert _token(logits, _row(temperature=0.0, output=[0], **penalty)) == 1


def test_frequency_penalty_grows_with_each_occurrence_and_presence_does_not() -> None:
    logits = [1.0, 0.0]
    often = [0] * 5
    assert _token(logits, _row(temperature=0.0, output=often, frequency_penalty=0.3)) == 1
    assert _token(logits, _row(temperature=0.0, output=often[:1], frequency_penalty=0.3)) == 0
    assert _token(logits, _row(temperature=0.0, output=often, presence_penalty=0.3)) == 0


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    logits = [2.0, 1.5, 1.4]
    assert _token(logits, _row(temperature=0.0, prompt=[0], repetition_penalty=1.5)) == 1
    row = _row(temperature=0.0, prompt=[0], output=[1], repetition_penalty=1.5)
    assert _token(logits, row) == 2


def test_logit_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    for seed in range(20):
        forced = _row(seed=seed, logit_bias=((4, 100.0),))
        assert _token([3.0, 2.0, 1.0, 0.0, -9.0], forced) == 4
        forbidden = _row(seed=seed, logit_bias=((0, -100.0), (1, -100.0)))
        assert _token([9.0, 9.0, 1.0], forbidden) == 2


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 10_000])
def test_logprobs_are_those_of_the_raw_logits(num_logprobs: int) -> None:
    logits = _logits(1)
    row = _row(
        temperature=0.3,
        top_k=4,
        logit_bias=((1, 50.0),),
        repetition_penalty=2.0,
        prompt=[2, 3],
        num_logprobs=num_logprobs,
    )
    (token,) = Sampler().sample(logits, [row])
    expected = torch.log_softmax(logits[0], dim=-1)
    assert token.token_id == 1
    assert token.logprob is not None
    assert token.logprob.token_id == 1
    assert token.logprob.logprob == pytest.approx(float(expected[1]), abs=1e-5)
    best = expected.argsort(descending=True, stable=True)[:num_logprobs].tolist()
    assert [token_id for token_id, _ in token.logprob.top] == best
    for token_id, logprob in token.logprob.top:
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


def test_logprobs_are_given_only_when_asked_for() -> None:
    rows = [_row(), _row(num_logprobs=0)]
    without, with_chosen = Sampler().sample(_logits(2), rows)
    assert without.logprob is None
    assert with_chosen.logprob is not None


def test_no_rows_give_no_tokens_and_a_wrong_number_is_refused() -> None:
    assert Sampler().sample(torch.empty(0, 4), []) == []
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        Sampler().sample(torch.zeros(2, 4), [_row()])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="row 1"):
        Sampler().sample(logits, [_row(temperature=temperature)] * 2)


def test_a_resumed_request_continues_with_the_number_of_its_next_token() -> None:
    logits = _logits(1)
    row = _row(seed=99, output=[5, 6, 7])
    again = dataclasses.replace(row, output_token_ids=(5, 6, 7))
    first = Sampler()
    first.sample(logits, [_row(seed=99, output=[5])])  # whatever was sampled before
    assert first.sample(logits, [row]) == Sampler().sample(logits, [again])


def _cuda_like_sampler(recorder: SyncRecorder) -> Sampler:
    """As on a device, but for FlashInfer's top-k, and every upload counted by the recorder."""
    filters = Filters(filter_top_k, filter_top_p)
    return Sampler(upload=recorder.expecting(share_memory), filters=filters)


def test_the_filters_of_a_device_choose_the_same_tokens() -> None:
    rows = _every_kind_of_row()
    logits = _logits(len(rows))
    on_device = Sampler(filters=Filters(filter_top_k, filter_top_p))
    assert on_device.sample(logits, rows) == Sampler().sample(logits, rows)


def test_starting_waits_for_nothing_and_brings_everything_in_one_copy() -> None:
    rows = _every_kind_of_row()
    logits = _logits(len(rows))
    with SyncRecorder() as recorder:
        sampler = _cuda_like_sampler(recorder)
        started = sampler.start(logits, rows)
        assert recorder.calls == []
        assert recorder.num_expected == 1
        assert started.token_ids.dtype is torch.int64
        sampler.start(logits, rows)  # now counts of penalised tokens are kept
        assert recorder.calls == []
    tokens = started.tokens()
    assert [token.token_id for token in tokens] == started.token_ids.tolist()
    assert tokens == Sampler().sample(logits, rows)


def test_greedy_rows_need_nothing_from_the_host() -> None:
    with SyncRecorder() as recorder:
        rows = [_row(temperature=0.0), _row(temperature=0.0, num_logprobs=3)]
        _cuda_like_sampler(recorder).start(_logits(2), [rows[0], rows[0]])
        _cuda_like_sampler(recorder).start(_logits(2), [rows[1], rows[1]])
        assert (recorder.calls, recorder.num_expected) == ([], 0)
        _cuda_like_sampler(recorder).start(_logits(2), rows)
        assert (recorder.calls, recorder.num_expected) == ([], 1)


def test_everything_comes_to_the_host_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []

    def read(values: Tensor) -> Callable[[], Tensor]:
        copied.append(values)
        return lambda: values

    monkeypatch.setattr("relaykv.engine.sampler.start_readback", read)
    rows = _every_kind_of_row()
    started = Sampler().start(_logits(len(rows)), rows)
    assert len(copied) == 1
    assert copied[0].dtype is torch.int32
    started.tokens()
    assert len(copied) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_of_logits_that_are_not_finite_can_be_looked_up_all_the_same(bad: float) -> None:
    # A step that was launched behind reads the embeddings of these before the host knows.
    rows = [*_every_kind_of_row(), *_every_kind_of_row()]
    logits = torch.full((len(rows), _VOCAB_SIZE), bad)
    started = Sampler(filters=Filters(filter_top_k, filter_top_p)).start(logits, rows)
    assert all(0 <= token_id < _VOCAB_SIZE for token_id in started.token_ids.tolist())
    with pytest.raises(FloatingPointError, match="row 0"):
        started.tokens()


def test_only_the_number_of_unknown_tokens_matters_to_a_plain_row() -> None:
    logits = _logits(3)
    params: list[dict[str, Any]] = [{"top_p": 0.9}, {"min_p": 0.1, "num_logprobs": 2}, {"top_k": 9}]
    known = [_row(seed=4, output=[7, 8, 9], **p) for p in params]
    unknown = [_row(seed=4, output=[7, 8, UNKNOWN_TOKEN], **p) for p in params]
    assert Sampler().sample(logits, known) == Sampler().sample(logits, unknown)


def test_alternatives_do_not_depend_on_how_many_another_row_wants() -> None:
    logits = _logits(3).round()  # many equal ones
    wanted = [_row(temperature=0.0, num_logprobs=num) for num in (1, 3, 400)]
    together = Sampler().sample(logits, wanted)
    for index, row in enumerate(wanted):
        assert Sampler().sample(logits[index : index + 1], [row]) == [together[index]]


def test_a_bias_on_a_token_that_has_no_logit_is_refused() -> None:
    with pytest.raises(IndexError, match="token 500 of a bias"):
        Sampler().sample(_logits(1), [_row(logit_bias=((500, 1.0),))])


def test_a_mixed_batch_takes_greedy_rows_as_they_are_and_draws_the_others() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 100.0], [0.0, 1.0, 0.9]])
    rows = [
        _row(temperature=0.0),
        _row(seed=3),
        _row(temperature=0.0, output=[1], frequency_penalty=0.5),
    ]
    assert [token.token_id for token in Sampler().sample(logits, rows)] == [1, 2, 2]


class _EvenTokens:
    """Grammars that allow even ids only; a mask is a byte shorter than the vocabulary needs."""

    def mask(self, *_: object) -> bytes:
        return bytes([0b01010101] * (-(-_VOCAB_SIZE // 8) - 1))

    def keep(self, request_ids: Collection[str]) -> None:
        assert request_ids


def test_a_grammars_mask_comes_with_the_same_copy_as_everything_else() -> None:
    grammars: Any = _EvenTokens()
    spec = GrammarSpec(GrammarKind.LARK, "start: X")
    rows = [_row(seed=3, grammar=spec), _row(seed=4, top_k=5), _row(temperature=0.0, grammar=spec)]
    logits = _logits(3)
    with SyncRecorder() as recorder:
        sampler = Sampler(
            grammars, recorder.expecting(share_memory), Filters(filter_top_k, filter_top_p)
        )
        started = sampler.start(logits, rows)
        assert (recorder.calls, recorder.num_expected) == ([], 1)
    drawn, free, greedy = (token.token_id for token in started.tokens())
    assert drawn % 2 == 0
    assert free == Sampler().sample(logits[1:2], [rows[1]])[0].token_id
    allowed = logits[2, : 8 * (-(-_VOCAB_SIZE // 8) - 1) : 2]
    assert greedy == 2 * int(allowed.argmax())
