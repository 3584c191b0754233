"""Chooses the next token of every row of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.batch import SampledToken, SamplingRow
from relaykv.engine.grammar import GrammarError, GrammarMatchers
from relaykv.engine.logit_changes import LogitChange, LogitChanges, draws
from relaykv.engine.logprobs import (
    ScoredTokens,
    Scores,
    num_columns,
    pack_logprobs,
    start_scores,
    unpack_logprobs,
)
from relaykv.engine.penalties import has_penalty
from relaykv.engine.request import SamplingParams
from relaykv.engine.row_subset import HostArray, RowSubset, Upload, share_memory
from relaykv.kernels.readback import start_readback
from relaykv.kernels.sampling import Filters, cpu_filters, sample_from_probs


@dataclass(frozen=True, slots=True)
class SampledRows:
    """A step's tokens, which the device may still be choosing.

    Attributes:
        token_ids: int64 [n] on the device, all of the vocabulary, also where logits are not
            finite: so the next step may look them up before the host knows.
    """

    token_ids: Tensor
    _asked: Mapping[int, int]  # by row that wants log-probabilities: how many alternatives
    _errors: Mapping[int, str]  # by row
    _num_columns: int  # of log-probabilities, per row that wants them
    _read: Callable[[], Tensor]  # int32: token ids, -1 where not finite; log-probabilities

    def tokens(self) -> list[SampledToken]:
        """Waits for the device.

        Raises:
            FloatingPointError: a row's logits hold NaN or +inf, or are all -inf.
        """
        host = self._read().numpy()
        num_rows = self.token_ids.shape[0]
        token_ids: list[int] = host[:num_rows].tolist()
        if -1 in token_ids:
            raise FloatingPointError(f"the logits of row {token_ids.index(-1)} are not finite")
        entries = unpack_logprobs(
            host[num_rows:].reshape(len(self._asked), self._num_columns),
            [token_ids[index] for index in self._asked],
            list(self._asked.values()),
        )
        logprobs = dict(zip(self._asked, entries, strict=True))
        return [
            SampledToken(token_id, logprobs.get(index), self._errors.get(index))
            for index, token_id in enumerate(token_ids)
        ]


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a step chooses its tokens. Subsets of the slow rows but for `slow` itself."""

    slow: RowSubset  # which draw, or whose logits are changed first
    changes: Sequence[LogitChange]
    drawn: RowSubset
    numbers: HostArray  # fp64, one per drawn row

    @property
    def arrays(self) -> list[HostArray]:
        """What has to be brought to the device for `choose`."""
        arrays = [*self.slow.arrays] if self.slow.indices else []
        for change in self.changes:
            arrays += change.arrays
        return [*arrays, *self.drawn.arrays, self.numbers] if self.drawn.indices else arrays

    def choose(self, logits: Tensor, brought: Iterator[Tensor]) -> Tensor:
        """Token ids [n] for logits [n, V]."""
        if not self.slow.indices:
            return logits.argmax(dim=-1)  # of equal logits, the lowest id
        at = self.slow.receive(brought)
        changed = self.slow.take(logits, at)
        for change in self.changes:
            changed = change.apply(changed, brought)
        chosen = self._draw(changed, brought) if self.drawn.indices else changed.argmax(dim=-1)
        return chosen if at is None else self.slow.put(logits.argmax(dim=-1), at, chosen)

    def _draw(self, logits: Tensor, brought: Iterator[Tensor]) -> Tensor:
        at, numbers = self.drawn.receive(brought), next(brought)
        probs = self.drawn.take(logits, at).softmax(dim=-1)
        chosen = sample_from_probs(probs, numbers)
        return chosen if at is None else self.drawn.put(logits.argmax(dim=-1), at, chosen)


class Sampler:
    """Penalties, bias, grammar, temperature, top-k, top-p, min-p, then the draw, in this order.

    A row's token depends on its logits and its `SamplingRow` alone, not on the other rows or on
    earlier steps: a request that was preempted continues as if it had not been.
    """

    def __init__(
        self,
        grammars: GrammarMatchers | None = None,
        upload: Upload = share_memory,
        filters: Filters | None = None,
    ) -> None:
        """
        Args:
            grammars: without them, rows that have a grammar end with an error.
            upload: brings host values to the logits' device; called once per step at most.
            filters: those of that device; a CPU's if None.
        """
        self._grammars = grammars
        self._upload = upload
        self._changes = LogitChanges(filters or cpu_filters())

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Chooses one token per row and waits for it; see `start` and `SampledRows.tokens`."""
        return self.start(logits, rows).tokens()

    def start(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
        """Starts choosing one token per row, without waiting for the device.

        Of `output_token_ids` only the length is looked at, unless the row has a penalty or a
        grammar: the tokens of other rows may still be unknown.

        Args:
            logits: [n, V] fp32 of the n rows; left unchanged.
            rows: n rows.

        Raises:
            ValueError: the number of rows differs.
            IndexError: a bias or a penalty names a token that has no logit.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
        vocab_size = logits.shape[1]
        masks, errors = self._masks(rows)
        choice = self._choice(rows, masks, vocab_size)
        asked = {
            i: num for i, row in enumerate(rows) if (num := row.params.num_logprobs) is not None
        }
        num_top = min(max(asked.values(), default=0), vocab_size)
        asked_rows = RowSubset(tuple(asked), len(rows))
        arrays = [*choice.arrays, *asked_rows.arrays] if asked else choice.arrays
        brought = iter(self._upload(arrays) if arrays else ())
        token_ids = choice.choose(logits, brought)
        finite = logits.amax(dim=-1).isfinite()
        packed = token_ids.int().masked_fill(~finite, -1)
        if asked:
            at = asked_rows.receive(brought)
            raw, chosen = asked_rows.take(logits, at), asked_rows.take(token_ids, at)
            packed = torch.cat([packed, pack_logprobs(raw, chosen, num_top).flatten()])
        read = start_readback(packed)
        return SampledRows(token_ids, asked, errors, num_columns(num_top), read)

    def start_scores(self, logits: Tensor, prompts: Sequence[ScoredTokens]) -> Scores:
        """Starts computing log-probabilities of prompts; see `logprobs.start_scores`."""
        return start_scores(logits, prompts, self._upload)

    def _choice(
        self, rows: Sequence[SamplingRow], masks: Mapping[int, bytes], vocab_size: int
    ) -> _Choice:
        slow = [index for index, row in enumerate(rows) if not _is_plain_greedy(row.params)]
        slow_rows = [rows[index] for index in slow]
        slow_masks = {place: masks[index] for place, index in enumerate(slow) if index in masks}
        drawn = [place for place, row in enumerate(slow_rows) if draws(row.params)]
        numbers = [
            uniform(row.seed, len(row.output_token_ids)) for row in slow_rows if draws(row.params)
        ]
        return _Choice(
            RowSubset(tuple(slow), len(rows)),
            self._changes.of(slow_rows, slow_masks, vocab_size),
            RowSubset(tuple(drawn), len(slow)),
            np.array(numbers, dtype=np.float64),
        )

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


def _is_plain_greedy(params: SamplingParams) -> bool:
    changes_logits = params.logit_bias or params.grammar is not None or has_penalty(params)
    return params.temperature == 0 and not changes_logits
