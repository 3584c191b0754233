"""How relayed KV differs from computed KV, layer by layer, over many hand-offs.

The measures are those of RelayCaching (arXiv 2603.13289, section 4.2 and appendix B.2): the cosine
between relayed and computed values, and how well neighbouring layers agree on which tokens
deviate most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCurves:
    """One number per layer, from layer 0."""

    value_similarity: FloatArray  # mean cosine of relayed and computed values
    key_similarity: FloatArray  # the same of keys at the same position; for people
    rank_correlation: FloatArray  # Spearman's, of a layer's deviations with the layer below

    def __post_init__(self) -> None:
        shapes = {self.value_similarity.shape, self.key_similarity.shape}
        shapes.add(self.rank_correlation.shape)
        if len(shapes) != 1 or not self.num_layers:
            raise ValueError("curves have one number per layer, all the same count, at least one")

    @property
    def num_layers(self) -> int:
        return len(self.value_similarity)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one hand-off has shown."""

    handoff: str
    num_tokens: int  # relayed
    curves: LayerCurves


def handoff_curves(
    value_deviation: FloatArray, key_deviation: FloatArray, rounding: float
) -> LayerCurves:
    """Curves of one hand-off.

    Args:
        value_deviation: [layers, relayed tokens], 1 - cosine (Eq. 1).
        key_deviation: likewise, of keys turned to the position of the computed ones.
        rounding: deviations below it are rounding and rank no token above another.
    """
    num_layers = len(value_deviation)
    ranked = np.where(value_deviation < rounding, 0.0, value_deviation)
    correlation = np.zeros(num_layers)  # nothing is below layer 0
    for layer in range(1, num_layers):
        correlation[layer] = rank_correlation(ranked[layer - 1], ranked[layer])
    return LayerCurves(
        value_similarity=1.0 - value_deviation.mean(axis=1),
        key_similarity=1.0 - key_deviation.mean(axis=1),
        rank_correlation=correlation,
    )


def mean_curves(curves: Sequence[LayerCurves]) -> LayerCurves:
    """The mean over hand-offs, each with the same weight."""
    return LayerCurves(
        value_similarity=np.mean([c.value_similarity for c in curves], axis=0),
        key_similarity=np.mean([c.key_similarity for c in curves], axis=0),
        rank_correlation=np.mean([c.rank_correlation for c in curves], axis=0),
    )


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank.

    Zero when one of the two ranks nothing, because all its values are equal.
    """
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    ranks_a -= ranks_a.mean()
    ranks_b -= ranks_b.mean()
    spread = float(np.sqrt((ranks_a**2).sum() * (ranks_b**2).sum()))
    return float((ranks_a * ranks_b).sum() / spread) if spread > 0 else 0.0


def _ranks(values: FloatArray) -> FloatArray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: FloatArray = (last - (counts - 1) / 2)[places]
    return ranks
