"""Finds recorded runs of tokens anywhere in a new prompt.

Recordings are cut into consecutive k-grams; a prompt is probed at every position with the same
rolling hash. A recorded run of 2k - 1 tokens always contains one whole k-gram, so every match of
`min_segment_tokens >= 2k - 1` is found. A probe's hit is only a hint: it is verified on the token
ids and extended both ways as far as they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaykv.engine.segment import Segment

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
# Highly repetitive text puts one k-gram at many places; trying more of them buys nothing.
_MAX_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class _Entry:
    """One recording as the index keeps it."""

    token_ids: NDArray[np.int64]
    taint: int
    hashes: NDArray[np.uint64]  # of its consecutive k-grams, at positions 0, k, 2k, ...


class SegmentIndex:
    """The recordings of one session, searchable by content."""

    def __init__(self, seed_tokens: int, min_segment_tokens: int) -> None:
        if min_segment_tokens < 2 * seed_tokens - 1:
            raise ValueError(
                f"min_segment_tokens {min_segment_tokens} is below 2 * seed_tokens - 1 = "
                f"{2 * seed_tokens - 1}: shorter matches could be missed"
            )
        self._seed_tokens = seed_tokens
        self._min_segment_tokens = min_segment_tokens
        self._entries: dict[int, _Entry] = {}
        self._table: _Table | None = None  # rebuilt at the first match after a change

    def add(self, recording_id: int, token_ids: Sequence[int], taint: int) -> None:
        """Makes a recording's tokens findable; `taint` counts approximate hand-offs behind it."""
        ids = np.asarray(token_ids, dtype=np.int64)
        hashes = _rolling_hashes(ids, self._seed_tokens)[:: self._seed_tokens]
        self._entries[recording_id] = _Entry(ids, taint, hashes)
        self._table = None

    def remove(self, recording_id: int) -> None:
        del self._entries[recording_id]
        self._table = None

    def match(self, token_ids: Sequence[int], start: int, stop: int) -> list[Segment]:
        """Covers [start, stop) of a prompt with disjoint segments, left to right.

        At each place the recording with the least taint wins, then the longest match, then
        the oldest recording (the producer's own, rather than a reader's copy).
        """
        ids = np.asarray(token_ids[:stop], dtype=np.int64)
        segments: list[Segment] = []
        if not self._entries or stop - start < self._min_segment_tokens:
            return segments
        if self._table is None:
            self._table = _Table.build(self._entries, self._seed_tokens)
        first, last = self._table.probe(_rolling_hashes(ids, self._seed_tokens))
        cursor = start
        for position in np.flatnonzero(last > first):
            if position < cursor:
                continue
            candidates = range(
                first[position], min(last[position], first[position] + _MAX_CANDIDATES)
            )
            best = self._best(ids, int(position), candidates, cursor)
            if best is not None:
                segments.append(best)
                cursor = best.stop
        return segments

    def _best(
        self, ids: NDArray[np.int64], position: int, candidates: range, cursor: int
    ) -> Segment | None:
        assert self._table is not None
        best: tuple[tuple[int, int, int], Segment] | None = None
        for index in candidates:
            recording_id, source = self._table.place(index)
            entry = self._entries[recording_id]
            segment = _extend(ids, position, cursor, entry.token_ids, source, recording_id)
            if segment.num_tokens < self._min_segment_tokens:
                continue
            rank = (entry.taint, -segment.num_tokens, recording_id)
            if best is None or rank < best[0]:
                best = (rank, segment)
        return best[1] if best else None


@dataclass(frozen=True, slots=True)
class _Table:
    """All k-grams of all recordings, sorted by hash, then oldest recording first."""

    hashes: NDArray[np.uint64]
    recording_ids: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def build(cls, entries: dict[int, _Entry], seed_tokens: int) -> _Table:
        hashes = np.concatenate([entry.hashes for entry in entries.values()])
        ids = np.concatenate([np.full(e.hashes.size, i, np.int64) for i, e in entries.items()])
        positions = np.concatenate(
            [np.arange(e.hashes.size, dtype=np.int64) * seed_tokens for e in entries.values()]
        )
        order = np.lexsort((positions, ids, hashes))
        return cls(hashes[order], ids[order], positions[order])

    def probe(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each hash the half-open range of equal entries."""
        return (
            np.searchsorted(self.hashes, hashes, side="left"),
            np.searchsorted(self.hashes, hashes, side="right"),
        )

    def place(self, index: int) -> tuple[int, int]:
        return int(self.recording_ids[index]), int(self.positions[index])


def _rolling_hashes(ids: NDArray[np.int64], k: int) -> NDArray[np.uint64]:
    """Polynomial hash (mod 2**64) of every k-gram; empty when there are fewer than k tokens."""
    count = max(ids.size - k + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    values = ids.astype(np.uint64) + np.uint64(1)  # so that token 0 counts
    for offset in range(k):
        hashes = hashes * _HASH_BASE + values[offset : offset + count]
    return hashes


def _extend(
    ids: NDArray[np.int64],
    position: int,
    cursor: int,
    recorded: NDArray[np.int64],
    source: int,
    recording_id: int,
) -> Segment:
    """The longest run through (position, source) on which both agree; empty if none."""
    ahead = _agreement(ids[position:], recorded[source:])
    behind = _agreement(ids[cursor:position][::-1], recorded[:source][::-1])
    return Segment(position - behind, position + ahead, recording_id, source - behind)


def _agreement(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the common start of two arrays."""
    length = min(a.size, b.size)
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if differs.size else length
