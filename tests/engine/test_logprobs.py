from __future__ import annotations

import pytest
import torch
from sync_recorder import SyncRecorder

from relaykv.engine import logprobs
from relaykv.engine.logprobs import ScoredTokens, start_scores
from relaykv.engine.request import TokenLogprob
from relaykv.engine.row_subset import share_memory

_VOCAB_SIZE = 50
PROMPTS = [ScoredTokens((4, 4, 9), 0), ScoredTokens((), 5), ScoredTokens((0, 49), 3)]
LOGITS = (torch.randn(5, _VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 4).round()


def _expected(prompts: list[ScoredTokens]) -> list[tuple[TokenLogprob, ...]]:
    rows = iter(LOGITS.log_softmax(dim=-1))
    result = []
    for prompt in prompts:
        entries = []
        for token_id in prompt.token_ids:
            row = next(rows).tolist()
            ranking = sorted(range(_VOCAB_SIZE), key=lambda i: (-row[i], i))
            top = tuple((i, row[i]) for i in ranking[: prompt.num_top])
            entries.append(TokenLogprob(token_id, row[token_id], top))
        result.append(tuple(entries))
    return result


@pytest.mark.parametrize("at_once", [1, 2 * _VOCAB_SIZE, 1 << 24])
def test_scores_are_the_log_probabilities_of_each_prompts_tokens(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_MAX_LOGITS_AT_ONCE", at_once)
    assert start_scores(LOGITS, PROMPTS, share_memory).logprobs() == _expected(PROMPTS)


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    prompts = [ScoredTokens((1, 2, 3, 4, 5), 1000)]
    assert start_scores(LOGITS, prompts, share_memory).logprobs() == _expected(prompts)


def test_starting_waits_for_nothing_and_uploads_once() -> None:
    with SyncRecorder() as recorder:
        scores = start_scores(LOGITS, PROMPTS, recorder.expecting(share_memory))
        assert (recorder.calls, recorder.num_expected) == ([], 1)
    assert scores.logprobs() == _expected(PROMPTS)


def test_nothing_to_score_uploads_nothing() -> None:
    with SyncRecorder() as recorder:
        upload = recorder.expecting(share_memory)
        scores = start_scores(LOGITS[:0], [ScoredTokens((), 3)], upload)
        assert (recorder.calls, recorder.num_expected) == ([], 0)
    assert scores.logprobs() == [()]
    assert start_scores(LOGITS[:0], [], share_memory).logprobs() == []


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="4 rows of logits for 5 tokens"):
        start_scores(LOGITS[:4], PROMPTS, share_memory)
