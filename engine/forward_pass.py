"""Runs the layers over the rows of a batch, whose set may change from layer to layer.

This is the one frame that every policy runs in (design, section 5). Rows of many requests,
decoding or not, relayed or not, go through together: a row simply is or is not active.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.batch import RecomputeCount
from relaykv.engine.forward_batch import ForwardBatch, IntArray, SpanRows
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Deviation
from relaykv.engine.recompute import select_tokens
from relaykv.kernels.attention import AttentionBackend, AttentionBatch
from relaykv.kernels.deviation import cosine_deviation, squared_deviation
from relaykv.kernels.store_kv import store_kv


@dataclass(frozen=True, slots=True)
class _ActiveRows:
    """The rows that are active at a layer, with all that depends on the set of them."""

    rows: IntArray  # into the forward batch, rising
    slots: Tensor  # int64 [n]
    cos: Tensor  # fp32 [n, rotary dim / 2]
    sin: Tensor
    plan: Any  # the attention backend's


class _RecomputeCounter:
    """Adds up what repairing relayed spans takes, by request."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, dict[int, int]] = defaultdict(dict)
        self._num_layer_tokens: dict[str, int] = defaultdict(int)

    def add(self, request_id: str, span_start: int, num_tokens: int, layer_tokens: int) -> None:
        self._num_tokens[request_id][span_start] = num_tokens
        self._num_layer_tokens[request_id] += layer_tokens

    def counts(self) -> dict[str, RecomputeCount]:
        return {
            request_id: RecomputeCount(num_tokens, self._num_layer_tokens[request_id])
            for request_id, num_tokens in self._num_tokens.items()
        }


class ForwardPass:
    """Drives a model over a KV cache. Holds no state of its own between steps."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        attention: AttentionBackend[Any],
        hidden_layer: int,
    ) -> None:
        """
        Args:
            hidden_layer: the layer whose input is kept beside the KV, where policies inject.
        """
        self._model = model
        self._cache = cache
        self._attention = attention
        self._hidden_layer = hidden_layer

    def run(self, batch: ForwardBatch) -> tuple[Tensor, dict[str, RecomputeCount]]:
        """Computes a batch: its KV goes to the cache.

        Returns:
            Logits of the sampled, then of the scored rows, fp32 [rows, vocab], and what repairs
            took.
        """
        counter = _RecomputeCounter()
        for static in batch.static_selections:
            layer_tokens = static.num_selected * static.num_layers
            counter.add(static.request_id, static.span_start, static.num_selected, layer_tokens)
        # A slot's last user may have left influence behind.
        self._cache.influence.index_fill_(0, batch.fresh_slots, 0.0)
        active: _ActiveRows | None = None
        plans: list[Any] = []
        hidden = torch.empty(0)
        for layer in range(self._model.config.num_layers):
            if active is None or self._rows_change(batch, layer):
                rows = np.flatnonzero((batch.enter <= layer) & (layer < batch.leave))
                hidden = self._carry(batch, layer, active, hidden, rows)
                active = self._activate(batch, rows)
                plans.append(active.plan)
            if layer == self._hidden_layer and layer > 0:
                self._cache.hidden.index_copy_(0, active.slots, hidden)
            q, k, v = self._model.project_qkv(layer, hidden, active.cos, active.sin)
            if any(span.bands.select == layer for span in batch.spans):
                batch = self._select(batch, layer, active, k, v, counter)
                keep = np.flatnonzero(layer < batch.leave[active.rows])
                index = torch.as_tensor(keep, device=self._cache.device)
                hidden, q, k, v = (x.index_select(0, index) for x in (hidden, q, k, v))
                active = self._activate(batch, active.rows[keep])
                plans.append(active.plan)
            k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
            store_kv(k_cache, v_cache, active.slots, k, v)
            attended = self._attention.run(active.plan, q, k_cache, v_cache)
            hidden = self._model.finish_layer(layer, hidden, attended)
        assert active is not None
        self._add_influence(plans)
        wanted = np.array((*batch.sample_rows, *batch.scored_rows), dtype=np.int64)
        samples = np.searchsorted(active.rows, wanted)
        sampled = hidden.index_select(0, torch.as_tensor(samples, device=hidden.device))
        return self._model.logits(sampled), counter.counts()

    @staticmethod
    def _rows_change(batch: ForwardBatch, layer: int) -> bool:
        return bool(((batch.enter == layer) | (batch.leave == layer)).any())

    def _carry(
        self,
        batch: ForwardBatch,
        layer: int,
        active: _ActiveRows | None,
        hidden: Tensor,
        rows: IntArray,
    ) -> Tensor:
        """Hidden states entering `layer` for its rows, [n, hidden size].

        Rows that go on bring theirs; rows that join start from the embedding at layer 0 and
        from the hidden state that was relayed with their KV above it.
        """
        device = self._cache.device
        joining = rows if active is None else np.setdiff1d(rows, active.rows, assume_unique=True)
        index = torch.as_tensor(joining, device=device)
        if layer == 0:
            joined = self._model.embed(batch.token_ids.index_select(0, index))
        else:
            joined = self._cache.hidden.index_select(0, batch.slots.index_select(0, index))
        if active is None:
            return joined
        going_on = np.flatnonzero(np.isin(active.rows, rows, assume_unique=True))
        kept = hidden.index_select(0, torch.as_tensor(going_on, device=device))
        if not joining.size:
            return kept
        merged = hidden.new_empty((rows.size, hidden.shape[1]))
        joins = np.isin(rows, joining, assume_unique=True)
        merged[torch.as_tensor(joins, device=device)] = joined
        merged[torch.as_tensor(~joins, device=device)] = kept
        return merged

    def _activate(self, batch: ForwardBatch, rows: IntArray) -> _ActiveRows:
        index = torch.as_tensor(rows, device=self._cache.device)
        positions = batch.positions.index_select(0, index)
        cos, sin = self._model.rope(positions)
        requests = np.arange(batch.num_requests + 1)
        indptr = np.searchsorted(batch.request_index[rows], requests, side="left")
        plan = self._attention.prepare(
            AttentionBatch(
                row_indptr=tuple(int(i) for i in indptr),
                row_positions=positions,
                block_indptr=batch.block_indptr,
                block_ids=batch.block_ids,
                counts_influence=batch.counts_influence,
            )
        )
        return _ActiveRows(rows, batch.slots.index_select(0, index), cos, sin, plan)

    def _select(
        self,
        batch: ForwardBatch,
        layer: int,
        active: _ActiveRows,
        k: Tensor,
        v: Tensor,
        counter: _RecomputeCounter,
    ) -> ForwardBatch:
        """Ends the rows of spans selecting at this layer, except those chosen, which go on."""
        leave = batch.leave.copy()
        for span in batch.spans:
            if span.bands.select != layer:
                continue
            first = int(np.searchsorted(active.rows, span.start))
            fresh = slice(first, first + span.stop - span.start)
            slots = active.slots[fresh]
            chosen = self._choose(span, v[fresh], layer, slots)
            if span.policy.selection.keep_fresh:
                store_kv(self._cache.k[layer], self._cache.v[layer], slots, k[fresh], v[fresh])
            leave[span.start : span.stop] = layer
            leave[span.start + np.array(chosen, dtype=np.int64)] = span.bands.stop + 1
            layer_tokens = (span.bands.select - span.bands.inject) * (span.stop - span.start)
            layer_tokens += (span.bands.stop + 1 - span.bands.select) * len(chosen)
            counter.add(span.request_id, span.span_start, len(chosen), layer_tokens)
        return replace(batch, leave=leave)

    def _choose(self, span: SpanRows, fresh: Tensor, layer: int, slots: Tensor) -> list[int]:
        """Offsets in the span that its policy computes again."""
        selection = span.policy.selection
        relayed = self._cache.v[layer].index_select(0, slots)
        deviation: list[float] | None = None
        if selection.deviation is Deviation.COSINE:
            deviation = cosine_deviation(fresh, relayed).tolist()
        elif selection.deviation is Deviation.SQUARED:
            deviation = squared_deviation(fresh, relayed).tolist()
        influence: list[float] | None = None
        if selection.influence_factor is not None:
            influence = self._cache.influence.index_select(0, slots).tolist()
        return select_tokens(selection, span.stop - span.start, deviation, influence)

    def _add_influence(self, plans: list[Any]) -> None:
        for plan in plans:
            for influence in self._attention.influence(plan):
                self._cache.influence.index_add_(0, influence.slots, influence.received)
