"""Index arrays of attention over paged KV: groups of rows, and the blocks that each group sees.

All of it is numpy on the host, in a few vector operations per batch. A group is a run of rows of
one request; attention treats it as a request of its own whose blocks are trimmed to what its last
row sees. Grouping sorted rows keeps them from reading keys that none of them may see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaykv.kernels.attention import IntArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows [indptr[g], indptr[g + 1]) form group g; no group is empty."""

    indptr: IntArray  # [groups + 1]; indptr[0] is the first row that is grouped
    requests: IntArray  # [groups]
    num_keys: IntArray  # [groups], what the last row of a group sees

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class PagedIndices:
    """What FlashInfer's paged wrappers plan with; a block is its page."""

    qo_indptr: Int32Array  # [groups + 1], from 0
    kv_indptr: Int32Array  # [groups + 1], into `kv_indices`
    kv_indices: Int32Array  # block ids
    last_page_len: Int32Array  # [groups], 1 to block size: keys in a group's last block


def row_groups(row_indptr: IntArray, row_positions: IntArray, group_rows: int | None) -> RowGroups:
    """Cuts the rows of each request into groups of at most `group_rows`.

    Args:
        row_indptr: [requests + 1]; need not start at 0.
        row_positions: [all rows of the batch], rising within a request.
        group_rows: None makes one group of each request that has rows.
    """
    counts = np.diff(row_indptr)
    if group_rows is None:
        group_rows = max(int(counts.max(initial=0)), 1)
    groups_per_request = -(-counts // group_rows)
    requests = np.repeat(np.arange(len(counts)), groups_per_request)
    firsts = np.cumsum(groups_per_request) - groups_per_request
    nth = np.arange(len(requests)) - firsts[requests]
    starts = row_indptr[requests] + nth * group_rows
    return _groups(starts, row_indptr, requests, row_positions)


def contiguous_runs(row_indptr: IntArray, row_positions: IntArray) -> RowGroups:
    """One group for each run of rows of a request whose positions have no gap.

    For such a group alone the causal mask that aligns the last row with the last key is right.
    """
    start, stop = int(row_indptr[0]), int(row_indptr[-1])
    begins = np.ones(stop - start, dtype=np.bool_)
    begins[1:] = np.diff(row_positions[start:stop]) != 1
    firsts = row_indptr[:-1][np.diff(row_indptr) > 0]
    begins[firsts - start] = True
    starts = np.flatnonzero(begins) + start
    requests = np.searchsorted(row_indptr, starts, side="right") - 1
    return _groups(starts, row_indptr, requests, row_positions)


def paged_indices(
    groups: RowGroups, block_indptr: IntArray, block_ids: IntArray, block_size: int
) -> PagedIndices:
    """Trims each group's blocks to the keys that it sees.

    Args:
        block_indptr: [requests + 1] into `block_ids`, of the requests that `groups` counts.
    """
    num_blocks = -(-groups.num_keys // block_size)
    kv_indptr = np.zeros(len(groups) + 1, dtype=np.int64)
    np.cumsum(num_blocks, out=kv_indptr[1:])
    offsets = np.repeat(block_indptr[groups.requests] - kv_indptr[:-1], num_blocks)
    kv_indices = block_ids[offsets + np.arange(kv_indptr[-1])]
    last_page_len = groups.num_keys - (num_blocks - 1) * block_size
    return PagedIndices(
        (groups.indptr - groups.indptr[0]).astype(np.int32),
        kv_indptr.astype(np.int32),
        kv_indices.astype(np.int32),
        last_page_len.astype(np.int32),
    )


def _groups(
    starts: IntArray, row_indptr: IntArray, requests: IntArray, row_positions: IntArray
) -> RowGroups:
    indptr = np.append(starts, row_indptr[-1])
    return RowGroups(indptr, requests, row_positions[indptr[1:] - 1] + 1)
