"""Which rows of a batch are active at which layers, as phases between two changes.

Everything is planned ahead on the host, as far as it is known: up to the next layer at which a
policy selects by what the forward pass itself finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaykv.engine.forward_batch import ForwardBatch
from relaykv.kernels.attention import AttentionBatch, IntArray


@dataclass(frozen=True, slots=True)
class RowPhase:
    """Whole layers [first_layer, stop_layer) with one set of rows; may be none."""

    first_layer: int
    stop_layer: int
    rows: IntArray  # into the forward batch, rising
    kept: IntArray  # of the phase before: places of its rows that go on
    kept_places: IntArray  # where these stand in `rows`
    joins: IntArray  # rows that were not active before
    joins_places: IntArray  # where these stand in `rows`


def plan_phases(
    batch: ForwardBatch, layer: int, before: IntArray | None, num_layers: int
) -> list[RowPhase]:
    """Phases from a layer up to the next selecting one, or to the end.

    Args:
        layer: the first layer; with `before`, the one in whose middle a selection has just taken
            place: the first phase then finishes it, and its whole layers begin behind it.
        before: rows that were active when the selection took place; None at the start.

    Returns:
        Phases without a gap. The last one's `stop_layer` is the selecting layer (whose rows it
        holds, and whose projections see all of them), or `num_layers`.
    """
    selecting = [s.bands.select for s in batch.spans if s.bands.select >= layer]
    if before is not None:
        selecting = [select for select in selecting if select > layer]
    end = min(selecting, default=num_layers)
    first = layer if before is None else layer + 1
    # At the selecting layer itself rows may join before the selection, hence `end + 1`.
    inner = range(layer + 1, min(end + 1, num_layers))
    starts = [layer, *(start for start in inner if _change(batch, start))]
    phases: list[RowPhase] = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        rows = np.flatnonzero((batch.enter <= start) & (start < batch.leave))
        whole = first if start == layer else start
        phases.append(_phase(whole, max(stop, whole), rows, before))
        before = rows
    return phases


def attention_batch(batch: ForwardBatch, rows: IntArray) -> AttentionBatch:
    """What attention needs to know of the active rows."""
    requests = np.arange(batch.num_requests + 1)
    return AttentionBatch(
        row_indptr=np.searchsorted(batch.request_index[rows], requests, side="left"),
        row_positions=batch.positions[rows],
        block_indptr=batch.block_indptr,
        block_ids=batch.block_ids,
        counts_influence=batch.counts_influence,
        num_decodes=batch.num_decodes,
        num_dense=batch.num_dense,
    )


def phase_arrays(batch: ForwardBatch, phase: RowPhase) -> Sequence[NDArray[Any]]:
    """What the device needs of a phase, beside its attention; see `ForwardPass`."""
    return (
        batch.slots[phase.rows],
        batch.positions[phase.rows],
        phase.kept,
        phase.kept_places,
        phase.joins,
        batch.slots[phase.joins],
        phase.joins_places,
    )


def _change(batch: ForwardBatch, layer: int) -> bool:
    return bool(((batch.enter == layer) | (batch.leave == layer)).any())


def _phase(first: int, stop: int, rows: IntArray, before: IntArray | None) -> RowPhase:
    none = np.zeros(0, dtype=np.int64)
    if before is None:
        return RowPhase(first, stop, rows, none, none, rows, np.arange(rows.size))
    goes_on = np.isin(before, rows, assume_unique=True)
    is_kept = np.isin(rows, before, assume_unique=True)
    return RowPhase(
        first,
        stop,
        rows,
        np.flatnonzero(goes_on),
        np.flatnonzero(is_kept),
        rows[~is_kept],
        np.flatnonzero(~is_kept),
    )
