"""A scheduled batch as flat rows and tensors: what the model's layers work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.batch import ScheduledBatch, ScheduledRequest
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.policy import Bands, Deviation, Policy
from relaykv.engine.recompute import select_tokens

IntArray = NDArray[np.int64]


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
    num_selected: int
    num_layers: int  # at which each of them is active


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of one step, request by request, positions rising within a request.

    A row is active at layers [enter, leave). Rows of a span that selects at a layer are active
    up to and including that layer; the forward pass extends or ends them there.
    """

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    request_index: IntArray  # [rows]
    enter: IntArray  # [rows]
    leave: IntArray  # [rows]
    spans: tuple[SpanRows, ...]
    static_selections: tuple[StaticSelection, ...]
    block_indptr: tuple[int, ...]  # blocks of request r in `block_ids`
    block_ids: Tensor  # int64
    counts_influence: tuple[bool, ...]
    fresh_slots: Tensor  # int64, of the rows that are not relayed
    sample_rows: tuple[int, ...]  # whose logits are needed
    sample_request_ids: tuple[str, ...]
    scored_rows: tuple[int, ...]  # likewise, for log-probabilities of prompts

    @property
    def num_requests(self) -> int:
        return len(self.counts_influence)


class ForwardBatchBuilder:
    """Collects the rows of one request after another."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        self._cache = cache
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
        """Lays out a batch. Influence of relayed spans must already be in place."""
        block_ids: list[int] = []
        block_indptr = [0]
        for index, request in enumerate(batch.requests):
            self._add(index, request)
            num_blocks = -(-request.stop // self._cache.block_size)
            block_ids.extend(request.block_ids[:num_blocks])
            block_indptr.append(len(block_ids))
        slots = np.array(self._slots, dtype=np.int64)
        fresh = slots[~np.array(self._relayed, dtype=bool)]
        return ForwardBatch(
            token_ids=self._tensor(self._token_ids),
            positions=self._tensor(self._positions),
            slots=self._tensor(slots),
            request_index=np.array(self._request_index, dtype=np.int64),
            enter=np.array(self._enter, dtype=np.int64),
            leave=np.array(self._leave, dtype=np.int64),
            spans=tuple(self._spans),
            static_selections=tuple(self._static),
            block_indptr=tuple(block_indptr),
            block_ids=self._tensor(block_ids),
            counts_influence=tuple(request.counts_influence for request in batch.requests),
            fresh_slots=self._tensor(fresh),
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
            self._add_span(index, request, span.start, span.stop)
            position = span.stop
        self._add_rows(index, request, range(position, request.stop), 0, self._num_layers, False)
        if request.sampling is not None:
            self._sample_rows.append(len(self._token_ids) - 1)
            self._sample_request_ids.append(request.request_id)

    def _add_span(self, index: int, request: ScheduledRequest, start: int, stop: int) -> None:
        policy = request.policy
        bands = policy.bands
        if bands is None:
            return  # relayed as it is: no row of it is ever computed
        if bands.inject == bands.select and policy.selection.deviation is Deviation.NONE:
            chosen = self._select_now(request, start, stop)
            positions = [start + offset for offset in chosen]
            self._add_rows(index, request, positions, bands.inject, bands.stop + 1, True)
            num_layers = bands.stop + 1 - bands.inject
            selection = StaticSelection(request.request_id, start, len(chosen), num_layers)
            self._static.append(selection)
            return
        first_row = len(self._token_ids)
        self._add_rows(index, request, range(start, stop), bands.inject, bands.select + 1, True)
        last_row = len(self._token_ids)
        self._spans.append(SpanRows(request.request_id, start, first_row, last_row, bands, policy))

    def _select_now(self, request: ScheduledRequest, start: int, stop: int) -> list[int]:
        influence = None
        if request.policy.selection.influence_factor is not None:
            slots = self._cache.slots(request.block_ids, start, stop)
            influence = self._cache.influence.index_select(0, slots).tolist()
        return select_tokens(request.policy.selection, stop - start, None, influence)

    def _add_rows(
        self,
        index: int,
        request: ScheduledRequest,
        positions: range | list[int],
        enter: int,
        leave: int,
        relayed: bool,
    ) -> None:
        size = self._cache.block_size
        count = len(positions)
        self._token_ids += [request.token_ids[p - request.start] for p in positions]
        self._positions += positions
        self._slots += [request.block_ids[p // size] * size + p % size for p in positions]
        self._request_index += [index] * count
        self._enter += [enter] * count
        self._leave += [leave] * count
        self._relayed += [relayed] * count

    def _tensor(self, values: list[int] | IntArray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._cache.device)
