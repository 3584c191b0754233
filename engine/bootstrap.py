"""Confidence intervals by resampling, of means that belong together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_NUM_DRAWS = 10_000
_SEED = 0
_TAIL = 2.5  # per cent on either side


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


class PairedBootstrap:
    """The percentile bootstrap (Efron) over cases that were all measured in several ways.

    Every draw takes cases with replacement, the same ones for all ways of measuring, so a ratio of
    two ways is freed from how much cases differ from one another. Draws are the same every time.
    """

    def __init__(self, values: FloatArray) -> None:
        """Takes [cases, ways], at least one case."""
        num_cases = values.shape[0]
        chosen = np.random.default_rng(_SEED).integers(num_cases, size=(_NUM_DRAWS, num_cases))
        # How often each case was drawn: [draws, cases].
        counts = np.zeros((_NUM_DRAWS, num_cases))
        np.add.at(counts, (np.arange(_NUM_DRAWS)[:, None], chosen), 1.0)
        self._means: FloatArray = counts @ values / num_cases  # [draws, ways]

    def mean(self, way: int) -> Interval:
        """Of one way's mean."""
        return _interval(self._means[:, way])

    def ratio(self, way: int, other: int) -> Interval | None:
        """Of one way's mean, divided by another's; None where the other's may be zero."""
        divisors = self._means[:, other]
        if (divisors <= 0.0).any():
            return None
        return _interval(self._means[:, way] / divisors)


def _interval(draws: FloatArray) -> Interval:
    low, high = np.percentile(draws, [_TAIL, 100.0 - _TAIL])
    return Interval(float(low), float(high))
