from __future__ import annotations

from dataclasses import replace

import numpy as np

from relaykv.engine.forward_batch import ForwardBatch, SpanRows
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.row_phases import attention_batch, plan_phases

LAYERS = 6
BY_VALUE = Selection(deviation=Deviation.COSINE, deviation_factor=1.5)


def _batch(enter: list[int], leave: list[int], *spans: SpanRows) -> ForwardBatch:
    rows = np.arange(len(enter))
    none = np.zeros(0, dtype=np.int64)
    return ForwardBatch(
        token_ids=rows,
        positions=rows,
        slots=rows + 100,
        request_index=np.zeros(len(enter), dtype=np.int64),
        enter=np.array(enter),
        leave=np.array(leave),
        unknown_rows=none,
        unknown_request_ids=(),
        spans=spans,
        static_selections=(),
        block_indptr=np.array([0, 1]),
        block_ids=np.array([0]),
        counts_influence=(False,),
        num_decodes=0,
        num_dense=0,
        fresh_slots=none,
        sample_rows=(),
        sample_request_ids=(),
        scored_rows=(),
    )


def _span(start: int, stop: int, bands: Bands) -> SpanRows:
    return SpanRows("r", 0, start, stop, bands, Policy("p", True, bands, BY_VALUE))


def test_rows_that_never_change_are_one_phase() -> None:
    (phase,) = plan_phases(_batch([0, 0], [LAYERS, LAYERS]), 0, None, LAYERS)

    assert (phase.first_layer, phase.stop_layer) == (0, LAYERS)
    assert phase.rows.tolist() == phase.joins.tolist() == phase.joins_places.tolist() == [0, 1]


def test_a_phase_begins_where_rows_join_and_where_they_leave() -> None:
    phases = plan_phases(_batch([0, 2, 0], [LAYERS, 4, LAYERS]), 0, None, LAYERS)

    assert [(p.first_layer, p.stop_layer) for p in phases] == [(0, 2), (2, 4), (4, LAYERS)]
    assert [p.rows.tolist() for p in phases] == [[0, 2], [0, 1, 2], [0, 2]]
    joining, leaving = phases[1], phases[2]
    assert (joining.kept.tolist(), joining.kept_places.tolist()) == ([0, 1], [0, 2])
    assert (joining.joins.tolist(), joining.joins_places.tolist()) == ([1], [1])
    assert leaving.kept.tolist() == [0, 2]
    assert leaving.joins.size == 0


def test_planning_stops_at_a_layer_that_selects() -> None:
    batch = _batch([0, 1, 1], [LAYERS, 4, 4], _span(1, 3, Bands(1, 3, 5)))

    phases = plan_phases(batch, 0, None, LAYERS)

    assert [(p.first_layer, p.stop_layer) for p in phases] == [(0, 1), (1, 3)]
    assert phases[-1].rows.tolist() == [0, 1, 2]


def test_rows_that_join_at_the_selecting_layer_see_its_projections() -> None:
    batch = _batch([0, 3, 1], [LAYERS, LAYERS, 4], _span(2, 3, Bands(1, 3, 5)))

    last = plan_phases(batch, 0, None, LAYERS)[-1]

    assert (last.first_layer, last.stop_layer) == (3, 3)
    assert last.rows.tolist() == [0, 1, 2]


def test_behind_a_selection_the_layer_is_finished_by_the_rows_that_stay() -> None:
    batch = _batch([0, 1, 1], [LAYERS, 4, 4], _span(1, 3, Bands(1, 3, 4)))
    before = plan_phases(batch, 0, None, LAYERS)[-1].rows
    chosen = replace(batch, leave=np.array([LAYERS, 3, 5]))

    phases = plan_phases(chosen, 3, before, LAYERS)

    assert [(p.first_layer, p.stop_layer) for p in phases] == [(4, 5), (5, LAYERS)]
    assert [p.rows.tolist() for p in phases] == [[0, 2], [0]]
    assert phases[0].kept.tolist() == [0, 2]


def test_a_selection_at_the_last_layer_leaves_no_whole_layer() -> None:
    batch = _batch([0, 1], [LAYERS, LAYERS], _span(1, 2, Bands(1, LAYERS - 1, LAYERS - 1)))
    before = plan_phases(batch, 0, None, LAYERS)[-1].rows
    chosen = replace(batch, leave=np.array([LAYERS, LAYERS - 1]))

    (phase,) = plan_phases(chosen, LAYERS - 1, before, LAYERS)

    assert (phase.first_layer, phase.stop_layer) == (LAYERS, LAYERS)
    assert phase.rows.tolist() == [0]


def test_attention_sees_only_the_active_rows_of_each_request() -> None:
    batch = replace(
        _batch([0] * 4, [LAYERS] * 4),
        request_index=np.array([0, 1, 1, 1]),
        counts_influence=(True, False),
        block_indptr=np.array([0, 1, 3]),
        block_ids=np.array([5, 6, 7]),
        num_decodes=1,
    )

    seen = attention_batch(batch, np.array([0, 2, 3]))

    assert seen.row_indptr.tolist() == [0, 1, 3]
    assert seen.row_positions.tolist() == [0, 2, 3]
    assert seen.num_decodes == 1
