"""What a step does to its rows' logits before it chooses tokens, first on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from relaykv.engine.batch import SamplingRow
from relaykv.engine.penalties import PenaltyCounts, has_penalty
from relaykv.engine.request import SamplingParams
from relaykv.engine.row_subset import HostArray, RowSubset
from relaykv.kernels.sampling import (
    Filters,
    apply_logit_bias,
    apply_penalties,
    apply_temperature,
    apply_token_mask,
    filter_min_p,
    unpack_bits,
)

# Up to here it is faster to look for the likeliest tokens than to sort them all.
_FEW_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class LogitChange:
    """A change of some rows' logits, with the host values that it needs on the device."""

    rows: RowSubset
    values: tuple[HostArray, ...]
    change: Callable[..., Tensor]  # logits [rows, V], then the values -> logits [rows, V]

    @property
    def arrays(self) -> tuple[HostArray, ...]:
        """What has to be brought to the device for `apply`."""
        return (*self.rows.arrays, *self.values)

    def apply(self, logits: Tensor, brought: Iterator[Tensor]) -> Tensor:
        """Takes those arrays off what was brought; new logits [n, V]."""
        at = self.rows.receive(brought)
        values = [next(brought) for _ in self.values]
        return self.rows.put(logits, at, self.change(self.rows.take(logits, at), *values))


class LogitChanges:
    """Penalties, bias, grammar; for rows that draw then temperature, top-k, top-p, min-p."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._counts = PenaltyCounts()

    def of(
        self, rows: Sequence[SamplingRow], masks: Mapping[int, bytes], vocab_size: int
    ) -> list[LogitChange]:
        """The changes of a step, in their order.

        Args:
            masks: by row: the tokens its grammar allows, one bit each.
        """
        changes = [
            self._penalise(rows, vocab_size),
            _bias(rows, vocab_size),
            _mask(len(rows), masks, vocab_size),
            _temperature(rows),
            self._top_k(rows, vocab_size),
            # Where top-k leaves few candidates, no vocabulary has to be sorted.
            self._top_p(rows, vocab_size, few_candidates=True),
            self._top_p(rows, vocab_size, few_candidates=False),
            _min_p(rows),
        ]
        return [change for change in changes if change.rows.indices]

    def _penalise(self, rows: Sequence[SamplingRow], vocab_size: int) -> LogitChange:
        subset, chosen = _where(rows, has_penalty)
        new = self._counts.find_new(chosen, vocab_size)
        penalties = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in (row.params for row in chosen)
        ]

        def penalise(logits: Tensor, penalties: Tensor, places: Tensor) -> Tensor:
            return apply_penalties(logits, *self._counts.count(new, places), penalties)

        return LogitChange(subset, (_floats(penalties), new.places), penalise)

    def _top_k(self, rows: Sequence[SamplingRow], vocab_size: int) -> LogitChange:
        subset, chosen = _where(rows, lambda p: draws(p) and 0 < p.top_k < vocab_size)
        values = np.array([row.params.top_k for row in chosen], dtype=np.int64)
        bound = max((row.params.top_k for row in chosen), default=0)

        def top_k(logits: Tensor, values: Tensor) -> Tensor:
            return self._filters.top_k(logits, values, bound)

        return LogitChange(subset, (values,), top_k)

    def _top_p(
        self, rows: Sequence[SamplingRow], vocab_size: int, *, few_candidates: bool
    ) -> LogitChange:
        def applies(params: SamplingParams) -> bool:
            is_few = 0 < params.top_k <= _FEW_CANDIDATES
            return draws(params) and params.top_p < 1 and is_few == few_candidates

        subset, chosen = _where(rows, applies)
        values = np.array([row.params.top_p for row in chosen], dtype=np.float64)
        bound = max((r.params.top_k for r in chosen), default=0) if few_candidates else vocab_size

        def top_p(logits: Tensor, values: Tensor) -> Tensor:
            return self._filters.top_p(logits, values, bound)

        return LogitChange(subset, (values,), top_p)


def draws(params: SamplingParams) -> bool:
    """Whether a row's token is drawn; the others take the likeliest."""
    return params.temperature > 0


def _where(
    rows: Sequence[SamplingRow], applies: Callable[[SamplingParams], bool]
) -> tuple[RowSubset, list[SamplingRow]]:
    indices = tuple(index for index, row in enumerate(rows) if applies(row.params))
    return RowSubset(indices, len(rows)), [rows[index] for index in indices]


def _bias(rows: Sequence[SamplingRow], vocab_size: int) -> LogitChange:
    subset, chosen = _where(rows, lambda params: bool(params.logit_bias))
    places, bias = [], []
    for index, row in enumerate(chosen):
        for token_id, addend in row.params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise IndexError(f"token {token_id} of a bias is not among the model's")
            places.append(index * vocab_size + token_id)
            bias.append(addend)
    return LogitChange(subset, (np.array(places, dtype=np.int64), _floats(bias)), apply_logit_bias)


def _mask(num_rows: int, masks: Mapping[int, bytes], vocab_size: int) -> LogitChange:
    subset = RowSubset(tuple(sorted(masks)), num_rows)
    packed = np.zeros((len(masks), -(-vocab_size // 8)), dtype=np.uint8)
    for bits, index in zip(packed, subset.indices, strict=True):
        mask = np.frombuffer(masks[index], dtype=np.uint8)[: bits.size]
        bits[: mask.size] = mask

    def mask_tokens(logits: Tensor, packed: Tensor) -> Tensor:
        return apply_token_mask(logits, unpack_bits(packed, vocab_size))

    return LogitChange(subset, (packed,), mask_tokens)


def _temperature(rows: Sequence[SamplingRow]) -> LogitChange:
    subset, chosen = _where(rows, draws)
    values = _floats([row.params.temperature for row in chosen])
    return LogitChange(subset, (values,), apply_temperature)


def _min_p(rows: Sequence[SamplingRow]) -> LogitChange:
    subset, chosen = _where(rows, lambda params: draws(params) and params.min_p > 0)
    return LogitChange(subset, (_floats([row.params.min_p for row in chosen]),), filter_min_p)


def _floats(values: Sequence[float] | Sequence[tuple[float, ...]]) -> HostArray:
    return np.array(values, dtype=np.float32)
