"""Finds a model's relay bands in its layer curves, as RelayCaching does.

The rules are those of arXiv 2603.13289, section 4.2 and appendix B.2, with the paper's thresholds.
Where the paper leaves something open, the choice is stated at the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from relaykv.engine.layer_curves import FloatArray, LayerCurves, mean_curves
from relaykv.engine.policy import Bands

_SIMILAR = 0.99  # the paper's threshold of the start
_NUM_LAST = 5  # layers at the end that say what a settled layer looks like
_NUM_STABLE = 2  # layers behind `stop` that must have settled
_NUM_RISING = 3  # layers there must be behind the minimum
_MAX_CHANGE = 2.0  # between settled layers, in standard deviations of the last ones
# Ours. A spread below it counts as this much: on a perfectly flat end no change would be small
# enough otherwise.
_MIN_SPREAD = 1e-3
_MIN_CORRELATION = 0.5  # ours: below it a ranking does not agree, however its growth bends
_NEARLY = 0.9  # of the highest correlation; where its growth never bends

_NUM_DRAWS = 200
_SEED = 0


@dataclass(frozen=True, slots=True)
class BandShares:
    """Shares of random draws of hand-offs (with replacement) that give the same bound."""

    inject: float
    select: float
    stop: float


def find_bands(curves: LayerCurves) -> Bands:
    """The bands that repair what a model's curves show."""
    inject = find_inject(curves.value_similarity)
    stop = max(find_stop(curves.value_similarity), inject)
    return Bands(inject, find_select(curves.rank_correlation, inject, stop), stop)


def find_inject(similarity: FloatArray) -> int:
    """The deepest layer before values deviate: the last of those that begin the model with >= 0.99.

    The paper takes the deepest layer of all at 0.99; deep layers that recover are left out here,
    since everything above the start would be out of reach.
    """
    below = np.flatnonzero(similarity < _SIMILAR)
    first = int(below[0]) if below.size else len(similarity)
    return max(first - 1, 0)


def find_stop(similarity: FloatArray) -> int:
    """The last layer worth repairing: from the minimum on, the first that settled ones follow.

    A layer has settled (Eq. 3) when its similarity is not below the last layers' mean less their
    standard deviation, and hardly differs from the layer before. With fewer than three layers
    behind the minimum there is no recovery to speak of, and repair goes on to the end.
    """
    last = len(similarity) - 1
    lowest = int(similarity.argmin())
    if last - lowest < _NUM_RISING:
        return last
    tail = similarity[-_NUM_LAST:]
    spread = max(float(tail.std()), _MIN_SPREAD)
    bound = float(tail.mean()) - spread
    change = np.abs(np.diff(similarity, prepend=similarity[0]))
    settled = (similarity >= bound) & (change < _MAX_CHANGE * spread)
    for layer in range(lowest, last - _NUM_STABLE + 1):
        if settled[layer + 1 : layer + 1 + _NUM_STABLE].all():
            return layer
    return last


def find_select(correlation: FloatArray, inject: int, stop: int) -> int:
    """The layer at which it is settled which tokens deviate.

    It follows the first layer at which the growth of the rank correlation turns from getting
    faster to getting slower (Eq. 4), and lies above `inject`, where values are still as relayed,
    and not above `stop`. The second difference is taken around its layer: taken backwards it
    could never give layer 3, which the paper reports for two of three models.
    """
    first = min(inject + 1, stop)
    # [layers - 2], of layers 1, 2, ...
    bend = correlation[2:] - 2 * correlation[1:-1] + correlation[:-2]
    for layer in range(2, len(correlation) - 1):
        turns = bend[layer - 2] > 0 > bend[layer - 1]
        if turns and correlation[layer] >= _MIN_CORRELATION:
            return min(max(layer + 1, first), stop)
    inside = correlation[first : stop + 1]
    top = float(inside.max())
    return first + int(np.flatnonzero(inside >= top - (1.0 - _NEARLY) * abs(top))[0])


def band_shares(curves: Sequence[LayerCurves], bands: Bands) -> BandShares:
    """How firmly the hand-offs decide: bootstrap over them, the same draws every time."""
    draws = np.random.default_rng(_SEED).integers(len(curves), size=(_NUM_DRAWS, len(curves)))
    found = [find_bands(mean_curves([curves[i] for i in draw])) for draw in draws]

    def share(bound: Callable[[Bands], int]) -> float:
        return sum(bound(other) == bound(bands) for other in found) / _NUM_DRAWS

    return BandShares(
        inject=share(lambda b: b.inject),
        select=share(lambda b: b.select),
        stop=share(lambda b: b.stop),
    )
