"""Index arrays against loops that build them one row and one block at a time."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from attention_cases import attention_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaykv.kernels.attention import AttentionBatch
from relaykv.kernels.attention_plan import (
    RowGroups,
    contiguous_runs,
    paged_indices,
    row_groups,
)

_BLOCK = 16

# Requests without rows, of one row, and of any rising positions in 13 blocks.
_POSITIONS = st.lists(st.integers(0, 13 * _BLOCK - 1), max_size=60, unique=True).map(sorted)
_REQUESTS = st.lists(_POSITIONS, max_size=8)


def _batch(rows: list[list[int]], first_request: int = 0) -> AttentionBatch:
    tables = [
        [int(b) for b in np.random.default_rng(r).permutation(64)[:13]] for r in range(len(rows))
    ]
    return attention_batch(rows, tables, num_decodes=first_request)


def _as_tuples(groups: RowGroups) -> list[tuple[int, int, int, int]]:
    bounds = pairwise(groups.indptr.tolist())
    return [
        (request, start, stop, num_keys)
        for request, (start, stop), num_keys in zip(
            groups.requests.tolist(), bounds, groups.num_keys.tolist(), strict=True
        )
    ]


@given(_REQUESTS, st.integers(1, 50) | st.none())
@settings(max_examples=150, deadline=None)
def test_groups_hold_each_row_once_and_see_what_their_last_row_sees(
    rows: list[list[int]], group_rows: int | None
) -> None:
    batch = _batch(rows)
    expected, first = [], 0
    for request, positions in enumerate(rows):
        size = group_rows or max(len(positions), 1)
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            expected.append((request, first + start, first + start + len(part), part[-1] + 1))
        first += len(positions)
    groups = row_groups(batch.row_indptr, batch.row_positions, group_rows)
    assert _as_tuples(groups) == expected


@given(_REQUESTS)
@settings(max_examples=150, deadline=None)
def test_runs_break_exactly_where_positions_have_a_gap(rows: list[list[int]]) -> None:
    batch = _batch(rows)
    expected: list[tuple[int, int, int, int]] = []
    row = 0
    for request, positions in enumerate(rows):
        for index, position in enumerate(positions):
            if index and positions[index - 1] + 1 == position:
                same_request, start, _, _ = expected.pop()
                expected.append((same_request, start, row + 1, position + 1))
            else:
                expected.append((request, row, row + 1, position + 1))
            row += 1
    assert _as_tuples(contiguous_runs(batch.row_indptr, batch.row_positions)) == expected


@given(_REQUESTS, st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_every_group_sees_the_slots_of_its_keys_in_order(
    rows: list[list[int]], group_rows: int
) -> None:
    batch = _batch(rows)
    groups = row_groups(batch.row_indptr, batch.row_positions, group_rows)
    indices = paged_indices(groups, batch.block_indptr, batch.block_ids, _BLOCK)
    for array in (
        indices.qo_indptr, indices.kv_indptr, indices.kv_indices, indices.last_page_len
    ):  # fmt: skip
        assert array.dtype == np.int32
        assert array.ndim == 1
        assert array.flags.c_contiguous
    assert indices.qo_indptr[0] == indices.kv_indptr[0] == 0
    assert len(indices.kv_indices) == indices.kv_indptr[-1]
    assert len(indices.qo_indptr) == len(indices.kv_indptr) == len(indices.last_page_len) + 1
    for group, request in enumerate(groups.requests.tolist()):
        start, stop = indices.kv_indptr[group : group + 2]
        blocks = indices.kv_indices[start:stop].astype(np.int64)
        num_keys = (len(blocks) - 1) * _BLOCK + int(indices.last_page_len[group])
        assert num_keys == groups.num_keys[group]
        assert 1 <= indices.last_page_len[group] <= _BLOCK
        table = batch.block_ids[batch.block_indptr[request] :]
        assert blocks.tolist() == table[: len(blocks)].tolist()


@given(_REQUESTS, st.integers(0, 8), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_a_range_of_requests_is_grouped_like_a_batch_of_its_own(
    rows: list[list[int]], first: int, group_rows: int
) -> None:
    first = min(first, len(rows))
    batch, own = _batch(rows), _batch(rows[first:])
    groups = row_groups(batch.row_indptr[first:], batch.row_positions, group_rows)
    expected = row_groups(own.row_indptr, own.row_positions, group_rows)
    begin = int(batch.row_indptr[first])
    assert (groups.indptr - begin).tolist() == expected.indptr.tolist()
    assert groups.requests.tolist() == expected.requests.tolist()
    indices = paged_indices(groups, batch.block_indptr[first:], batch.block_ids, _BLOCK)
    assert indices.qo_indptr.tolist() == expected.indptr.tolist()
    for group, request in enumerate(groups.requests.tolist()):
        start, stop = indices.kv_indptr[group : group + 2]
        table = batch.block_ids[batch.block_indptr[first + request] :]
        assert indices.kv_indices[start:stop].tolist() == table[: stop - start].tolist()


@pytest.mark.parametrize(
    ("position", "num_blocks", "last"), [(0, 1, 1), (15, 1, 16), (16, 2, 1), (31, 2, 16)]
)
def test_last_page_length_counts_from_one_to_a_full_block(
    position: int, num_blocks: int, last: int
) -> None:
    batch = _batch([[position]])
    groups = row_groups(batch.row_indptr, batch.row_positions, 1)
    indices = paged_indices(groups, batch.block_indptr, batch.block_ids, _BLOCK)
    assert indices.kv_indptr.tolist() == [0, num_blocks]
    assert indices.last_page_len.tolist() == [last]


def test_ten_thousand_rows_take_milliseconds() -> None:
    rows = [list(range(r, 5000 + r, 2)) for r in range(4)]
    tables = [list(range(1000 * r, 1000 * r + 400)) for r in range(4)]
    batch = attention_batch(rows, tables)
    best = min(_seconds_to_plan(batch) for _ in range(5))
    assert best < 0.010


def _seconds_to_plan(batch: AttentionBatch) -> float:
    start = time.process_time()
    groups = row_groups(batch.row_indptr, batch.row_positions, 42)
    paged_indices(groups, batch.block_indptr, batch.block_ids, _BLOCK)
    return time.process_time() - start
