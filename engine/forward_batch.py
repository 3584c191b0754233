"""A scheduled batch as flat rows: what the model's layers work on, still on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from relaykv.engine.batch import UNKNOWN_TOKEN, ScheduledBatch, ScheduledRequest
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.prefill_plan import Span
from relaykv.engine.recompute import select_tokens
from relaykv.kernels.attention import IntArray


@dataclass(frozen=True, slots=True)
class SpanRows:
    """A relayed span whose policy selects at a layer: its rows are [start, stop)."""

    request_id: str
    span_start: int  # in the prompt
    start: int
    stop: int
    bands: Bands
    policy: Policy


@dataclass(frozen=True, slots=True)
class StaticSelection:
    """A relayed span whose recomputed tokens were known before the forward."""

    request_id: str
    span_start: int
    offsets: tuple[int, ...]  # in the span, sorted
    num_layers: int  # at which each of them is active


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of one step, request by request, positions rising within a request.

    A row is active at layers [enter, leave). Rows of a span that selects at a layer are active
    up to and including that layer; the forward pass extends or ends them there. Requests stand in
    the order that `AttentionBatch` asks for.
    """

    token_ids: IntArray  # [rows]; anything where `unknown_rows` says so
    positions: IntArray  # [rows]
    slots: IntArray  # [rows]
    request_index: IntArray  # [rows]
    enter: IntArray  # [rows]
    leave: IntArray  # [rows]
    unknown_rows: IntArray  # whose token is still being sampled by the step before
    unknown_request_ids: tuple[str, ...]  # and for which request
    spans: tuple[SpanRows, ...]
    static_selections: tuple[StaticSelection, ...]
    block_indptr: IntArray  # blocks of request r in `block_ids`
    block_ids: IntArray
    counts_influence: tuple[bool, ...]
    num_decodes: int  # requests of a single row, at the head
    num_dense: int  # behind them: requests that relay nothing
    fresh_slots: IntArray  # of the rows that are not relayed
    sample_rows: tuple[int, ...]  # whose logits are needed
    sample_request_ids: tuple[str, ...]
    scored_rows: tuple[int, ...]  # likewise, for log-probabilities of prompts

    @property
    def num_requests(self) -> int:
        return len(self.counts_influence)

    @property
    def is_decode_only(self) -> bool:
        return self.num_decodes == self.num_requests


def in_row_order(batch: ScheduledBatch) -> ScheduledBatch:
    """The same batch with decodes first, then dense chunks, then those with relayed spans."""
    return replace(batch, requests=tuple(sorted(batch.requests, key=_row_class)))


def _row_class(request: ScheduledRequest) -> int:
    if request.relay_spans:
        return 2
    return 0 if request.stop - request.start == 1 else 1


class ForwardBatchBuilder:
    """Collects the rows of one request after another."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._num_layers = num_layers
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._request_index: list[int] = []
        self._enter: list[int] = []
        self._leave: list[int] = []
        self._relayed: list[bool] = []
        self._slots: list[int] = []
        self._spans: list[SpanRows] = []
        self._static: list[StaticSelection] = []
        self._sample_rows: list[int] = []
        self._sample_request_ids: list[str] = []
        self._scored_rows: list[int] = []

    def build(self, batch: ScheduledBatch) -> ForwardBatch:
        """Lays out a batch in row order. Influence of relayed spans must already be in place."""
        block_ids: list[int] = []
        block_indptr = [0]
        for index, request in enumerate(batch.requests):
            self._add(index, request)
            num_blocks = -(-request.stop // self._block_size)
            block_ids.extend(request.block_ids[:num_blocks])
            block_indptr.append(len(block_ids))
        classes = [_row_class(request) for request in batch.requests]
        assert classes == sorted(classes), "the batch is not in row order"
        slots = _ints(self._slots)
        token_ids, request_index = _ints(self._token_ids), _ints(self._request_index)
        unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
        return ForwardBatch(
            token_ids=np.maximum(token_ids, 0),
            positions=_ints(self._positions),
            slots=slots,
            request_index=request_index,
            enter=_ints(self._enter),
            leave=_ints(self._leave),
            unknown_rows=unknown,
            unknown_request_ids=tuple(
                batch.requests[index].request_id for index in request_index[unknown]
            ),
            spans=tuple(self._spans),
            static_selections=tuple(self._static),
            block_indptr=_ints(block_indptr),
            block_ids=_ints(block_ids),
            counts_influence=tuple(request.counts_influence for request in batch.requests),
            num_decodes=classes.count(0),
            num_dense=classes.count(1),
            fresh_slots=slots[~np.array(self._relayed, dtype=bool)],
            sample_rows=tuple(self._sample_rows),
            sample_request_ids=tuple(self._sample_request_ids),
            scored_rows=tuple(self._scored_rows),
        )

    def _add(self, index: int, request: ScheduledRequest) -> None:
        position = request.start
        first_row = len(self._token_ids)
        self._scored_rows += range(first_row, first_row + len(request.scored_token_ids))
        for span in request.relay_spans:
            self._add_rows(index, request, range(position, span.start), 0, self._num_layers, False)
            self._add_span(index, request, span)
            position = span.stop
        self._add_rows(index, request, range(position, request.stop), 0, self._num_layers, False)
        if request.sampling is not None:
            self._sample_rows.append(len(self._token_ids) - 1)
            self._sample_request_ids.append(request.request_id)

    def _add_span(self, index: int, request: ScheduledRequest, span: Span) -> None:
        policy, start, stop = span.policy, span.start, span.stop
        assert policy is not None
        bands = policy.bands
        if bands is None:
            return  # relayed as it is: no row of it is ever computed
        if bands.inject == bands.select and policy.selection.deviation is Deviation.NONE:
            chosen = self._select_now(request, policy.selection, start, stop)
            positions = [start + offset for offset in chosen]
            self._add_rows(index, request, positions, bands.inject, bands.stop + 1, True)
            num_layers = bands.stop + 1 - bands.inject
            selection = StaticSelection(request.request_id, start, tuple(chosen), num_layers)
            self._static.append(selection)
            return
        first_row = len(self._token_ids)
        self._add_rows(index, request, range(start, stop), bands.inject, bands.select + 1, True)
        last_row = len(self._token_ids)
        self._spans.append(SpanRows(request.request_id, start, first_row, last_row, bands, policy))

    def _select_now(
        self, request: ScheduledRequest, selection: Selection, start: int, stop: int
    ) -> list[int]:
        influence = None
        if selection.influence_factor is not None:
            slots = self._cache.slots(request.block_ids, start, stop)
            influence = self._cache.influence.index_select(0, slots).tolist()
        return select_tokens(selection, stop - start, None, influence)

    def _add_rows(
        self,
        index: int,
        request: ScheduledRequest,
        positions: range | list[int],
        enter: int,
        leave: int,
        relayed: bool,
    ) -> None:
        count = len(positions)
        self._token_ids += [request.token_ids[p - request.start] for p in positions]
        self._positions += positions
        self._slots += self._slots_of(request, positions)
        self._request_index += [index] * count
        self._enter += [enter] * count
        self._leave += [leave] * count
        self._relayed += [relayed] * count

    def _slots_of(self, request: ScheduledRequest, positions: Iterable[int]) -> list[int]:
        size = self._block_size
        return [request.block_ids[p // size] * size + p % size for p in positions]


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
