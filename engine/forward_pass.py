"""Runs the layers over the rows of a batch, whose set may change from layer to layer.

This is the one frame that every policy runs in (design, section 5). Rows of many requests,
decoding or not, relayed or not, go through together: a row simply is or is not active.

The host plans all that it can know and brings it to the device in one copy: once for a step, and
once more behind every layer at which a policy selects by what that layer found out. Reading that
finding is the only point where the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.batch import RecomputeCount
from relaykv.engine.forward_batch import ForwardBatch, SpanRows
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Deviation
from relaykv.engine.recompute import RecomputeCounter, select_tokens
from relaykv.engine.row_phases import (
    RowPhase,
    attention_batch,
    phase_arrays,
    plan_phases,
)
from relaykv.kernels.attention import AttentionBackend, IntArray
from relaykv.kernels.kernel_set import KernelSet
from relaykv.kernels.staging import Staging

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _ActiveRows:
    """A phase on the device: its rows, with all that depends on the set of them."""

    phase: RowPhase
    slots: Tensor  # int64 [n]
    kept: Tensor  # int64, as in `RowPhase`; likewise the next four
    kept_places: Tensor
    joins: Tensor
    joins_slots: Tensor
    joins_places: Tensor
    cos: Tensor  # fp32 [n, rotary dim / 2]
    sin: Tensor
    plan: Any  # the attention backend's


class ForwardPass:
    """Drives a model over a KV cache. Holds no state of a request between steps."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        attention: AttentionBackend[Any, Any],
        hidden_layer: int,
        staging: Staging,
        kernels: KernelSet,
        influence_layer_stride: int = 1,
    ) -> None:
        """
        Args:
            hidden_layer: the layer whose input is kept beside the KV, where policies inject.
            staging: brings index arrays to the device.
            kernels: fit for that device.
            influence_layer_stride: attention received is added up on every n-th layer.
        """
        self._model = model
        self._cache = cache
        self._attention = attention
        self._hidden_layer = hidden_layer
        self._staging = staging
        self._kernels = kernels
        self._influence_layer_stride = influence_layer_stride

    def run(
        self,
        batch: ForwardBatch,
        sampled_before: tuple[Tensor, IntArray] | None = None,
        counts_influence: bool = True,
    ) -> tuple[Tensor, dict[str, RecomputeCount]]:
        """Computes a batch: its KV goes to the cache.

        Args:
            sampled_before: int64 [m] tokens of the step before, and the places in it of the
                batch's unknown rows.
            counts_influence: False leaves attention received out of this step.

        Returns:
            Logits of the sampled, then of the scored rows, fp32 [rows, vocab], and what repairs
            took.
        """
        counter = RecomputeCounter()
        for static in batch.static_selections:
            layer_tokens = len(static.offsets) * static.num_layers
            counter.add(static.request_id, static.span_start, static.offsets, layer_tokens)
        last = self._model.config.num_layers
        wanted = np.array((*batch.sample_rows, *batch.scored_rows), dtype=np.int64)
        before = _NONE if sampled_before is None else sampled_before[1]
        phases = plan_phases(batch, 0, None, last)
        (tokens, fresh, unknown_rows, places, samples), actives = self._bring(
            batch,
            phases,
            (batch.token_ids, batch.fresh_slots, batch.unknown_rows, before, _find(phases, wanted)),
        )
        if sampled_before is not None:
            tokens = tokens.index_copy(0, unknown_rows, sampled_before[0].index_select(0, places))
        # A slot's last user may have left influence behind.
        self._cache.influence.index_fill_(0, fresh, 0.0)
        received = self._cache.influence if counts_influence else None
        hidden = self._run_phases(actives, tokens, None, received)
        while phases[-1].stop_layer < last:
            # The layer at which policies select: its attention runs without the rows they drop.
            layer, before = phases[-1].stop_layer, phases[-1].rows
            q, k, v = self._project(actives[-1], layer, hidden)
            batch = self._select(batch, layer, actives[-1], k, v, counter)
            phases = plan_phases(batch, layer, before, last)
            (samples,), actives = self._bring(batch, phases, (_find(phases, wanted),))
            first = actives[0]
            hidden, q, k, v = (x.index_select(0, first.kept) for x in (hidden, q, k, v))
            hidden = self._finish(first, layer, hidden, q, k, v, received)
            hidden = self._run_layers(first, hidden, received)
            hidden = self._run_phases(actives[1:], tokens, hidden, received)
        logits = self._model.logits(hidden.index_select(0, samples))
        return logits, counter.counts()

    def run_decode(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, plan: Any, counts_influence: bool
    ) -> Tensor:
        """All layers for rows that all decode; device work only, so that a graph can hold it.

        Args:
            tokens, slots, positions: int64 [n].
            plan: the attention backend's, for these rows.

        Returns:
            Logits, fp32 [n, vocab].
        """
        self._cache.influence.index_fill_(0, slots, 0.0)
        cos, sin = self._model.rope(positions)
        phase = RowPhase(0, self._model.config.num_layers, _NONE, _NONE, _NONE, _NONE, _NONE)
        none = slots[:0]  # nothing is carried over from another phase
        active = _ActiveRows(phase, slots, none, none, none, none, none, cos, sin, plan)
        received = self._cache.influence if counts_influence else None
        return self._model.logits(self._run_layers(active, self._model.embed(tokens), received))

    def _bring(
        self, batch: ForwardBatch, phases: Sequence[RowPhase], extra: Sequence[IntArray]
    ) -> tuple[list[Tensor], list[_ActiveRows]]:
        """Brings `extra` and everything that phases need to the device, in one copy."""
        layouts = [self._attention.layout(attention_batch(batch, p.rows)) for p in phases]
        arrays: list[NDArray[Any]] = [*extra]
        for phase, layout in zip(phases, layouts, strict=True):
            arrays += [*phase_arrays(batch, phase), *layout.arrays]
        brought = iter(self._staging.upload(arrays))
        tensors = [next(brought) for _ in extra]
        actives = []
        for phase, layout in zip(phases, layouts, strict=True):
            slots, positions, kept, kept_places, joins, joins_slots, joins_places = (
                next(brought) for _ in range(7)
            )
            cos, sin = self._model.rope(positions)
            plan = self._attention.prepare(layout, [next(brought) for _ in layout.arrays])
            actives.append(
                _ActiveRows(
                    phase,
                    slots,
                    kept,
                    kept_places,
                    joins,
                    joins_slots,
                    joins_places,
                    cos,
                    sin,
                    plan,
                )
            )
        return tensors, actives

    def _run_phases(
        self,
        actives: Sequence[_ActiveRows],
        tokens: Tensor,
        hidden: Tensor | None,
        received: Tensor | None,
    ) -> Tensor:
        """Carries hidden states from phase to phase and runs their layers.

        Args:
            tokens: int64 [rows of the batch].
            hidden: of the phase before the first one; None at the first layer.
        """
        for active in actives:
            hidden = self._carry(active, tokens, hidden)
            hidden = self._run_layers(active, hidden, received)
        assert hidden is not None
        return hidden

    def _carry(self, active: _ActiveRows, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """Hidden states entering a phase's first layer for its rows, [n, hidden size].

        Rows that go on bring theirs; rows that join start from the embedding at layer 0 and
        from the hidden state that was relayed with their KV above it.
        """
        if hidden is None:
            return self._model.embed(tokens.index_select(0, active.joins))
        kept = hidden.index_select(0, active.kept)
        if not active.phase.joins.size:
            return kept
        merged = hidden.new_empty((active.phase.rows.size, hidden.shape[1]))
        merged.index_copy_(0, active.kept_places, kept)
        joined = self._cache.hidden.index_select(0, active.joins_slots)
        return merged.index_copy_(0, active.joins_places, joined)

    def _run_layers(self, active: _ActiveRows, hidden: Tensor, received: Tensor | None) -> Tensor:
        for layer in range(active.phase.first_layer, active.phase.stop_layer):
            q, k, v = self._project(active, layer, hidden)
            hidden = self._finish(active, layer, hidden, q, k, v, received)
        return hidden

    def _project(
        self, active: _ActiveRows, layer: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer; keeps the hidden states that policies inject."""
        if layer == self._hidden_layer and layer > 0:
            self._cache.hidden.index_copy_(0, active.slots, hidden)
        return self._model.project_qkv(layer, hidden, active.cos, active.sin)

    def _finish(
        self,
        active: _ActiveRows,
        layer: int,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        received: Tensor | None,
    ) -> Tensor:
        """The rest of a layer behind its projections."""
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        self._kernels.store_kv(k_cache, v_cache, active.slots, k, v)
        counted = received if layer % self._influence_layer_stride == 0 else None
        attended = self._attention.run(active.plan, q, k_cache, v_cache, counted)
        return self._model.finish_layer(layer, hidden, attended)

    def _select(
        self,
        batch: ForwardBatch,
        layer: int,
        active: _ActiveRows,
        k: Tensor,
        v: Tensor,
        counter: RecomputeCounter,
    ) -> ForwardBatch:
        """Ends the rows of spans selecting at this layer, except those chosen, which go on."""
        spans = [span for span in batch.spans if span.bands.select == layer]
        fresh_rows = []
        for span in spans:
            first = int(np.searchsorted(active.phase.rows, span.start))
            fresh_rows.append(slice(first, first + span.stop - span.start))
        leave = batch.leave.copy()
        for span, chosen in zip(
            spans, self._choose(spans, fresh_rows, layer, active, v), strict=True
        ):
            leave[span.start : span.stop] = layer
            leave[span.start + np.array(chosen, dtype=np.int64)] = span.bands.stop + 1
            layer_tokens = (span.bands.select - span.bands.inject) * (span.stop - span.start)
            layer_tokens += (span.bands.stop + 1 - span.bands.select) * len(chosen)
            counter.add(span.request_id, span.span_start, chosen, layer_tokens)
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        for span, rows in zip(spans, fresh_rows, strict=True):
            if span.policy.selection.keep_fresh:
                self._kernels.store_kv(k_cache, v_cache, active.slots[rows], k[rows], v[rows])
        return replace(batch, leave=leave)

    def _choose(
        self,
        spans: Sequence[SpanRows],
        fresh_rows: Sequence[slice],
        layer: int,
        active: _ActiveRows,
        v: Tensor,
    ) -> list[list[int]]:
        """Offsets in each span that its policy computes again; waits for the device once."""
        v_cache = self._cache.v[layer]
        measured: list[Tensor] = []
        for span, rows in zip(spans, fresh_rows, strict=True):
            selection, slots = span.policy.selection, active.slots[rows]
            if selection.deviation is Deviation.COSINE:
                measured.append(self._kernels.cosine_deviation(v[rows], v_cache, slots))
            elif selection.deviation is Deviation.SQUARED:
                measured.append(self._kernels.squared_deviation(v[rows], v_cache, slots))
            if selection.influence_factor is not None:
                measured.append(self._cache.influence.index_select(0, slots))
        values = iter(torch.cat(measured).tolist() if measured else ())
        chosen = []
        for span in spans:
            selection, num_tokens = span.policy.selection, span.stop - span.start
            deviation = influence = None
            if selection.deviation is not Deviation.NONE:
                deviation = list(islice(values, num_tokens))
            if selection.influence_factor is not None:
                influence = list(islice(values, num_tokens))
            chosen.append(select_tokens(selection, num_tokens, deviation, influence))
        return chosen


def _find(phases: Sequence[RowPhase], rows: IntArray) -> IntArray:
    """Places of rows of the batch among those of the last phase."""
    return np.searchsorted(phases[-1].rows, rows)
