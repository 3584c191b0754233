"""Chooses the next token of every row of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.batch import SampledToken, SamplingRow
from relaykv.engine.grammar import GrammarError, GrammarMatchers
from relaykv.engine.request import SamplingParams, TokenLogprob
from relaykv.kernels.sampling import (
    apply_logit_bias,
    apply_penalties,
    apply_temperature,
    apply_token_mask,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    sample_from_probs,
)


class Sampler:
    """Penalties, bias, grammar, temperature, top-k, top-p, min-p, then the draw, in this order.

    A row's token depends on its logits and its `SamplingRow` alone, not on the other rows or on
    earlier steps: a request that was preempted continues as if it had not been.
    """

    def __init__(self, grammars: GrammarMatchers | None = None) -> None:
        """Without `grammars`, rows that have a grammar end with an error."""
        self._grammars = grammars

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Chooses one token per row.

        Args:
            logits: [n, V] fp32 of the n rows; left unchanged.
            rows: n rows.

        Raises:
            ValueError: the number of rows differs.
            FloatingPointError: a row's logits hold NaN or +inf, or are all -inf.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
        if not rows:
            return []
        finite = logits.amax(dim=-1).isfinite()
        masks, errors = self._masks(rows)
        # One copy to the host carries both the tokens and whether they mean anything.
        token_ids: list[int] = torch.where(finite, _choose(logits, rows, masks), -1).tolist()
        if -1 in token_ids:
            raise FloatingPointError(f"the logits of row {token_ids.index(-1)} are not finite")
        tokens = []
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            num_top = row.params.num_logprobs
            logprob = None if num_top is None else token_logprob(logits[index], token_id, num_top)
            tokens.append(SampledToken(token_id, logprob, errors.get(index)))
        return tokens

    def _masks(self, rows: Sequence[SamplingRow]) -> tuple[dict[int, bytes], dict[int, str]]:
        """By row: the tokens its grammar allows, or why it has none to allow."""
        masks: dict[int, bytes] = {}
        errors: dict[int, str] = {}
        for index, row in enumerate(rows):
            spec = row.params.grammar
            if spec is None:
                continue
            if self._grammars is None:
                errors[index] = "this engine has no constrained decoding"
                continue
            try:
                masks[index] = self._grammars.mask(row.request_id, spec, row.output_token_ids)
            except GrammarError as error:
                errors[index] = f"constrained decoding failed: {error}"
        if self._grammars is not None:
            self._grammars.keep([row.request_id for row in rows])
        return masks, errors


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses the output token at an index, from a hash of both."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _choose(logits: Tensor, rows: Sequence[SamplingRow], masks: Mapping[int, bytes]) -> Tensor:
    """Token ids [n] for logits [n, V]; masks by row."""
    slow = [index for index, row in enumerate(rows) if not _is_plain_greedy(row.params)]
    if not slow:
        return logits.argmax(dim=-1)  # of equal logits, the lowest id
    at_slow = torch.tensor(slow, device=logits.device)
    chosen = _choose_slow(
        logits[at_slow],
        [rows[index] for index in slow],
        {place: masks[index] for place, index in enumerate(slow) if index in masks},
    )
    if len(slow) == len(rows):
        return chosen
    return logits.argmax(dim=-1).index_copy(0, at_slow, chosen)


def _choose_slow(logits: Tensor, rows: Sequence[SamplingRow], masks: Mapping[int, bytes]) -> Tensor:
    """As `_choose`, for rows that draw or whose logits are changed first."""
    logits = _where(logits, rows, _has_penalty, _penalise)
    for index, row in enumerate(rows):
        if row.params.logit_bias:
            token_ids, bias = zip(*row.params.logit_bias, strict=True)
            at_tokens = torch.tensor(token_ids, device=logits.device)
            biased = apply_logit_bias(logits[index], at_tokens, _like(logits, bias))
            logits = logits.index_copy(
                0, torch.tensor([index], device=logits.device), biased.unsqueeze(0)
            )
    for index, mask in masks.items():
        masked = apply_token_mask(logits[index], _bits(mask, logits))
        logits = logits.index_copy(
            0, torch.tensor([index], device=logits.device), masked.unsqueeze(0)
        )
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return logits.argmax(dim=-1)
    at_drawn = torch.tensor(drawn, device=logits.device)
    chosen = _draw(logits[at_drawn], [rows[index] for index in drawn])
    if len(drawn) == len(rows):
        return chosen
    return logits.argmax(dim=-1).index_copy(0, at_drawn, chosen)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Token ids [n] drawn from logits [n, V], after penalties and bias."""
    vocab_size = logits.shape[-1]
    logits = apply_temperature(logits, _like(logits, [row.params.temperature for row in rows]))
    logits = _where(logits, rows, lambda params: 0 < params.top_k < vocab_size, _top_k)
    logits = _where(logits, rows, lambda params: params.top_p < 1, _top_p)
    logits = _where(logits, rows, lambda params: params.min_p > 0, _min_p)
    numbers = [uniform(row.seed, len(row.output_token_ids)) for row in rows]
    return sample_from_probs(
        logits.softmax(dim=-1), torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    )


def _where(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    applies: Callable[[SamplingParams], bool],
    change: Callable[[Tensor, Sequence[SamplingRow]], Tensor],
) -> Tensor:
    """Changes those rows of logits [n, V] that a condition applies to; returns new logits."""
    indices = [index for index, row in enumerate(rows) if applies(row.params)]
    if not indices:
        return logits
    at_indices = torch.tensor(indices, device=logits.device)
    changed = change(logits[at_indices], [rows[index] for index in indices])
    return logits.index_copy(0, at_indices, changed)


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    prompt_counts = torch.zeros_like(logits)
    output_counts = torch.zeros_like(logits)
    for index, row in enumerate(rows):
        if row.params.repetition_penalty != 1:  # the only one that looks at the prompt
            _count(prompt_counts[index], row.prompt_token_ids)
        _count(output_counts[index], row.output_token_ids)
    penalties = [
        (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        for p in (row.params for row in rows)
    ]
    return apply_penalties(logits, prompt_counts, output_counts, _like(logits, penalties))


def _count(counts: Tensor, token_ids: Sequence[int]) -> None:
    """Adds the occurrences of token ids to counts [V], in place."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=counts.device)
    counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))


def _top_k(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    values = [row.params.top_k for row in rows]
    return filter_top_k(logits, torch.tensor(values, device=logits.device))


def _top_p(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    values = [row.params.top_p for row in rows]
    return filter_top_p(logits, torch.tensor(values, dtype=torch.float64, device=logits.device))


def _min_p(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return filter_min_p(logits, _like(logits, [row.params.min_p for row in rows]))


def _like(logits: Tensor, values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _bits(mask: bytes, logits: Tensor) -> Tensor:
    """Bool [V] of a bit mask, lowest bit first."""
    bits = np.unpackbits(
        np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=logits.shape[-1]
    )
    return torch.from_numpy(bits).to(logits.device).bool()


def _is_plain_greedy(params: SamplingParams) -> bool:
    changes_logits = params.logit_bias or params.grammar is not None or _has_penalty(params)
    return params.temperature == 0 and not changes_logits


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities of one row's raw logits [V]: of a token and of the `num_top` likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(num_top, logits.shape[-1]))
    pairs = zip(token_ids.tolist(), values.tolist(), strict=True)
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))  # topk orders equal ones freely
    return TokenLogprob(token_id, float(logprobs[token_id]), tuple(top))
