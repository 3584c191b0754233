"""A run of tokens of a recording that stands again in a new prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Half-open token range of a prompt whose KV a recording holds."""

    start: int  # in the new prompt
    stop: int
    recording_id: int
    source_start: int  # position of the first token in the recording

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def shift(self) -> int:
        """New position minus old position: the rotation that the keys need."""
        return self.start - self.source_start

    def clip(self, start: int, stop: int) -> Segment:
        """The part of the segment inside [start, stop); may be empty."""
        first = min(max(self.start, start), self.stop)
        last = max(min(self.stop, stop), first)
        return Segment(first, last, self.recording_id, self.source_start + first - self.start)
