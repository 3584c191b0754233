"""Finds recorded runs of tokens anywhere in a new prompt.

Every run of `min_segment_tokens` tokens of every recording is in a table under its rolling hash;
a prompt is probed with the same hash at every position. So no match of that length is missed, and
text that only nearly matches, however repetitive, costs nothing. A hit is verified on the token
ids and extended as far as they agree; it cannot be extended to the left, or it would have been
found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaykv.engine.segment import Segment

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
# Highly repetitive text puts one run at many places; trying more of them buys little.
_MAX_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class _Entry:
    """One recording as the index keeps it."""

    token_ids: NDArray[np.int64]
    taint: int


class SegmentIndex:
    """The recordings of one session, searchable by content."""

    def __init__(self, min_segment_tokens: int) -> None:
        if min_segment_tokens < 1:
            raise ValueError(f"a segment has at least one token, not {min_segment_tokens}")
        self._min_segment_tokens = min_segment_tokens
        self._entries: dict[int, _Entry] = {}
        self._table = _Table()

    def add(self, recording_id: int, token_ids: Sequence[int], taint: int) -> None:
        """Makes a recording's tokens findable.

        Args:
            recording_id: above all ids so far.
            taint: counts the approximate hand-offs behind the recording.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        self._entries[recording_id] = _Entry(ids, taint)
        self._table = self._table.extended(
            recording_id, _rolling_hashes(ids, self._min_segment_tokens)
        )

    def remove(self, recording_id: int) -> None:
        del self._entries[recording_id]
        self._table = self._table.without(recording_id)

    def match(self, token_ids: Sequence[int], start: int, stop: int) -> list[Segment]:
        """Covers [start, stop) of a prompt with disjoint segments, left to right.

        At each place the recording with the least taint wins, then the longest match, then
        the oldest recording (the producer's own, rather than a reader's copy).
        """
        ids = np.asarray(token_ids[start:stop], dtype=np.int64)
        first, last = self._table.probe(_rolling_hashes(ids, self._min_segment_tokens))
        hits = np.flatnonzero(last > first)
        segments: list[Segment] = []
        next_hit = 0
        while next_hit < hits.size:
            position = int(hits[next_hit])
            num_candidates = min(int(last[position] - first[position]), _MAX_CANDIDATES)
            places = self._table.places(int(first[position]), num_candidates)
            best = self._best(ids, position, places)
            next_position = position + 1
            if best is not None:
                next_position = best.stop
                segments.append(
                    Segment(
                        start + best.start, start + best.stop, best.recording_id, best.source_start
                    )
                )
            next_hit = int(np.searchsorted(hits, next_position))
        return segments

    def _best(
        self, ids: NDArray[np.int64], position: int, places: Iterable[tuple[int, int]]
    ) -> Segment | None:
        """The best match that starts at `position`; None when only hashes were equal."""
        best: tuple[tuple[int, int, int, int], Segment] | None = None
        for recording_id, source in places:
            entry = self._entries[recording_id]
            num_tokens = _agreement(ids[position:], entry.token_ids[source:])
            if num_tokens < self._min_segment_tokens:
                continue
            rank = (entry.taint, -num_tokens, recording_id, source)
            if best is None or rank < best[0]:
                best = (rank, Segment(position, position + num_tokens, recording_id, source))
        return best[1] if best else None


@dataclass(frozen=True, slots=True)
class _Table:
    """Where every recorded run starts, sorted by its hash, then oldest recording first."""

    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    recording_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def extended(self, recording_id: int, hashes: NDArray[np.uint64]) -> _Table:
        """With a recording's runs, one per position; sorts only them and merges."""
        positions = np.argsort(hashes, kind="stable")
        hashes = hashes[positions]
        places = np.searchsorted(self.hashes, hashes, side="right")
        return _Table(
            np.insert(self.hashes, places, hashes),
            np.insert(self.recording_ids, places, recording_id),
            np.insert(self.positions, places, positions),
        )

    def without(self, recording_id: int) -> _Table:
        keep = self.recording_ids != recording_id
        return _Table(self.hashes[keep], self.recording_ids[keep], self.positions[keep])

    def probe(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each hash the half-open range of equal entries."""
        return (
            np.searchsorted(self.hashes, hashes, side="left"),
            np.searchsorted(self.hashes, hashes, side="right"),
        )

    def places(self, first: int, count: int) -> Iterable[tuple[int, int]]:
        """Recording and position of `count` entries from `first`."""
        entries = slice(first, first + count)
        return zip(
            self.recording_ids[entries].tolist(), self.positions[entries].tolist(), strict=True
        )


def _rolling_hashes(ids: NDArray[np.int64], k: int) -> NDArray[np.uint64]:
    """Polynomial hash (mod 2**64) of every k-gram; empty when there are fewer than k tokens."""
    count = max(ids.size - k + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    values = ids.astype(np.uint64) + np.uint64(1)  # so that token 0 counts
    for offset in range(k if count else 0):
        hashes = hashes * _HASH_BASE + values[offset : offset + count]
    return hashes


def _agreement(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the common start of two arrays."""
    length = min(a.size, b.size)
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if differs.size else length
