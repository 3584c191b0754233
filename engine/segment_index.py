"""Finds recorded runs of tokens anywhere in a new prompt.

Every run of `min_segment_tokens` tokens of every recording is in a table under its rolling hash;
a prompt is probed with the same hash at every position. So no match of that length is missed, and
text that only nearly matches, however repetitive, costs nothing. A hit is verified on the token
ids and extended as far as they agree; it cannot be extended to the left, or it would have been
found there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaykv.engine.segment import Segment

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
# Highly repetitive text puts one run at many places; trying more of them buys little.
_MAX_CANDIDATES = 16
_CHUNK = 256  # probes that are looked up together
_FILTER_ENTRIES_PER_RUN = 8  # so that one probe in eight, at most, is looked up in vain


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

    def match(
        self, token_ids: Sequence[int], start: int, stop: int, without: Collection[int] = ()
    ) -> list[Segment]:
        """Covers [start, stop) of a prompt with disjoint segments, left to right.

        At each place the recording with the least taint wins, then the longest match, then
        the oldest recording (the producer's own, rather than a reader's copy).

        Args:
            without: ids of recordings that are not to be found.
        """
        ids = np.asarray(token_ids[start:stop], dtype=np.int64)
        hashes = _rolling_hashes(ids, self._min_segment_tokens)
        maybe = self._table.maybe(hashes)
        segments: list[Segment] = []
        place = 0  # in `maybe`
        while place < maybe.size:
            # A few at a time: most of what follows a hit is going to be covered by its segment.
            some = maybe[place : place + _CHUNK]
            hits = some[self._table.holds(hashes[some])]
            best = None
            if hits.size:
                position = int(hits[0])
                places = self._table.places(hashes[position])
                best = self._best(ids, position, [p for p in places if p[0] not in without])
                place = int(np.searchsorted(maybe, best.stop if best else position + 1))
            else:
                place += _CHUNK
            if best is not None:
                segments.append(
                    Segment(
                        start + best.start, start + best.stop, best.recording_id, best.source_start
                    )
                )
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
    # Whether any hash starts with these bits: looking there is much cheaper than a binary search.
    filter: NDArray[np.bool_] = field(init=False)
    recording_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "filter", _filter(self.hashes))

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

    def maybe(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Which of the hashes may be in the table; none that is in it is missing."""
        return np.flatnonzero(self.filter[hashes >> self._shift])

    def holds(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the hashes are in the table, which is not empty."""
        first = np.searchsorted(self.hashes, hashes)
        found: NDArray[np.bool_] = self.hashes[np.minimum(first, self.hashes.size - 1)] == hashes
        return found

    def places(self, wanted: np.uint64) -> Iterable[tuple[int, int]]:
        """Recordings and positions of a hash, not too many of them."""
        first = int(np.searchsorted(self.hashes, wanted, side="left"))
        last = int(np.searchsorted(self.hashes, wanted, side="right"))
        entries = slice(first, min(last, first + _MAX_CANDIDATES))
        return zip(
            self.recording_ids[entries].tolist(), self.positions[entries].tolist(), strict=True
        )

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(65 - self.filter.size.bit_length())


def _filter(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """A table with a power of two of entries, more than two, by the hashes' leading bits."""
    num_bits = (_FILTER_ENTRIES_PER_RUN * hashes.size + 2).bit_length()
    filled = np.zeros(1 << num_bits, dtype=np.bool_)
    filled[hashes >> np.uint64(64 - num_bits)] = True
    return filled


def _rolling_hashes(ids: NDArray[np.int64], k: int) -> NDArray[np.uint64]:
    """Polynomial hash (mod 2**64) of every k-gram; empty when there are fewer than k tokens.

    Put together from hashes of runs of one, two, four, ... tokens, in log2(k) steps.
    """
    count = max(ids.size - k + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    power_of = ids.astype(np.uint64) + np.uint64(1)  # so that token 0 counts; of 2**bit tokens
    power = _HASH_BASE  # to the number of these
    start = 0  # tokens that are in `hashes`
    for bit in range(k.bit_length() if count else 0):
        length = 1 << bit
        if k & length:
            hashes = hashes * power + power_of[start : start + count]
            start += length
        power_of = power_of[:-length] * power + power_of[length:]
        with np.errstate(over="ignore"):
            power = power * power
    return hashes


def _agreement(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the common start of two arrays."""
    length = min(a.size, b.size)
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if differs.size else length
