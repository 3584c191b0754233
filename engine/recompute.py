"""The decision of a policy at its selection layer: which tokens of a segment stay active, and
what computing them takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from relaykv.engine.batch import RecomputeCount
from relaykv.engine.policy import Selection


class RecomputeCounter:
    """Adds up what repairing relayed spans takes in one step, by request."""

    def __init__(self) -> None:
        self._offsets: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._num_layer_tokens: dict[str, int] = defaultdict(int)

    def add(
        self, request_id: str, span_start: int, offsets: Iterable[int], layer_tokens: int
    ) -> None:
        """Notes what one span of a request took.

        Args:
            offsets: in the span, sorted: the tokens computed again.
            layer_tokens: rows of the span over all layers.
        """
        self._offsets[request_id][span_start] = tuple(offsets)
        self._num_layer_tokens[request_id] += layer_tokens

    def counts(self) -> dict[str, RecomputeCount]:
        return {
            request_id: RecomputeCount(offsets, self._num_layer_tokens[request_id])
            for request_id, offsets in self._offsets.items()
        }


def select_tokens(
    selection: Selection,
    num_tokens: int,
    deviation: Sequence[float] | None,
    influence: Sequence[float] | None,
) -> list[int]:
    """Chooses the tokens of one segment that are computed again, as sorted offsets.

    Args:
        num_tokens: length of the segment.
        deviation: fresh against relayed values, one per token; None when it was not measured.
        influence: attention each token has received; None when nothing was collected.
    """
    num_first = max(selection.num_first, math.ceil(selection.first_share * num_tokens))
    chosen = set(range(min(num_first, num_tokens)))
    chosen.update(range(max(num_tokens - selection.num_last, 0), num_tokens))
    if deviation is not None:
        chosen.update(_by_deviation(selection, deviation))
    if influence is not None and selection.influence_factor is not None:
        chosen.update(_above_mean(influence, selection.influence_factor))
    return sorted(chosen)


def _by_deviation(selection: Selection, deviation: Sequence[float]) -> list[int]:
    chosen: list[int] = []
    if selection.deviation_factor is not None:
        candidates = _above_mean(deviation, selection.deviation_factor)
        chosen += [i for i in candidates if deviation[i] >= selection.deviation_floor]
    if selection.deviation_share is not None:
        count = math.ceil(selection.deviation_share * len(deviation))
        by_size = sorted(range(len(deviation)), key=lambda i: (-deviation[i], i))
        chosen += by_size[:count]
    return chosen


def _above_mean(values: Sequence[float], factor: float) -> list[int]:
    """Offsets whose value is at least `factor` times the mean; none when all are zero."""
    mean = math.fsum(values) / len(values) if values else 0.0
    if mean <= 0.0:
        return []
    return [i for i, value in enumerate(values) if value >= factor * mean]
