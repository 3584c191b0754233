"""The profiler on models whose right bands are known, because their deviations are planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_model import (
    Reading,
    planted_handoffs,
    planted_model,
    planted_parts,
    prompt,
)

from relaykv.engine.band_search import find_bands
from relaykv.engine.handoff import Consumer, Handoff, HandoffError, Producer
from relaykv.engine.layer_curves import LayerCurves, Measurement, mean_curves
from relaykv.engine.policy import Bands
from relaykv.engine.profiler import Profiler

_TOKEN, _LITTLE, _MUCH, _LESS = 0.0, 0.02, 1.0, 0.5
# The mixing layer is 1. Layers 2 and 3 read too little of what it wrote to be below 0.99; up to
# layer 5 the two blocks take turns, so no layer ranks tokens as the one below; from layer 9 on
# nothing changes any more.
_PLANTED = [
    Reading(_TOKEN),
    Reading(_TOKEN),
    Reading(_LITTLE, 0),
    Reading(_LITTLE, 1),
    Reading(_MUCH, 0),
    Reading(_MUCH, 1),
    *[Reading(_MUCH, 1)] * 3,
    *[Reading(_LESS, 1)] * 5,
]


def measure(
    readings: list[Reading], mixing_layer: int | None, count: int = 6, max_tokens: int = 64
) -> list[Measurement]:
    parts = planted_parts(planted_model(readings, mixing_layer))
    profiler = Profiler(parts, prompt, planted_handoffs(count), max_tokens)
    return list(profiler.measure(lambda _: None))


@pytest.fixture(scope="module")
def planted() -> list[Measurement]:
    return measure(_PLANTED, mixing_layer=1)


def curves_of(measurements: list[Measurement]) -> LayerCurves:
    return mean_curves([measurement.curves for measurement in measurements])


def test_planted_bands_are_found_exactly(planted: list[Measurement]) -> None:
    curves = curves_of(planted)

    assert find_bands(curves) == Bands(inject=3, select=7, stop=9)
    np.testing.assert_allclose(curves.value_similarity[:2], 1.0, atol=1e-6)
    assert (curves.value_similarity[2:4] > 0.99).all()
    assert (curves.value_similarity[4:9] < 0.8).all()
    assert (np.abs(curves.rank_correlation[:6]) < 0.3).all()
    assert (curves.rank_correlation[6:] > 0.98).all()


@pytest.mark.parametrize(
    ("readings", "mixing_layer", "bands"),
    [
        # The first layer mixes, the next ones read it alike, and layer 5 begins a calm end.
        ([Reading(_TOKEN), *[Reading(_MUCH)] * 4, *[Reading(0.4)] * 5], 0, Bands(0, 3, 5)),
        # Every layer reads more than the one below: no end but the last layer.
        ([*[Reading(_TOKEN)] * 3, *[Reading(0.2 * i) for i in range(1, 8)]], 2, Bands(2, 5, 9)),
        # Nothing depends on the text before it.
        ([Reading(_MUCH)] * 8, None, Bands(7, 7, 7)),
    ],
)
def test_other_planted_bands_are_found_exactly(
    readings: list[Reading], mixing_layer: int | None, bands: Bands
) -> None:
    assert find_bands(curves_of(measure(readings, mixing_layer))) == bands


def test_keys_that_depend_on_the_token_alone_are_equal_once_they_are_moved(
    planted: list[Measurement],
) -> None:
    np.testing.assert_allclose(curves_of(planted).key_similarity, 1.0, atol=1e-5)


def test_two_runs_measure_the_same(planted: list[Measurement]) -> None:
    again = measure(_PLANTED, mixing_layer=1)

    assert [m.handoff for m in planted] == [m.handoff for m in again]
    for one, other in zip(planted, again, strict=True):
        assert np.array_equal(one.curves.value_similarity, other.curves.value_similarity)
        assert np.array_equal(one.curves.rank_correlation, other.curves.rank_correlation)


def test_all_generated_tokens_but_the_last_of_every_producer_are_compared(
    planted: list[Measurement],
) -> None:
    # The last token of an answer was never fed to the model, so it has no KV.
    assert [m.num_tokens for m in planted] == [63, 63, 126] * 2


def test_progress_counts_handoffs_and_nothing_is_left_in_the_cache() -> None:
    parts = planted_parts(planted_model(_PLANTED, 1))
    handoffs = planted_handoffs(9)
    profiler = Profiler(parts, prompt, handoffs, 48)
    steps: list[float] = []

    measurements = list(profiler.measure(steps.append))

    assert [m.handoff for m in measurements] == [handoff.id for handoff in handoffs]
    assert sum(steps) == pytest.approx(9)
    assert min(steps) >= 0
    stats = profiler.core.stats()
    assert stats.num_recorded_blocks == stats.num_used_blocks == 0
    # Room for four hand-offs of up to 620 tokens in all, however many there are.
    assert stats.num_total_blocks * 16 < 4 * 620


def test_answers_too_short_to_be_relayed_give_no_measurement() -> None:
    assert measure(_PLANTED, 1, count=2, max_tokens=20) == []


def test_text_that_the_prefix_cache_would_serve_is_not_compared() -> None:
    """Where a consumer goes on behind what a producer wrote, its KV is exact, not relayed."""
    producer = Producer("the same role", "and the same words")
    template = "and the same words~{output_1} and on"
    same = Handoff("same", "", (producer,), Consumer("the same role", template))
    other = replace(same, id="other", consumer=Consumer("another role", template))
    parts = planted_parts(planted_model(_PLANTED, 1))

    measurements = Profiler(parts, prompt, [same, other], 64).measure(lambda _: None)

    assert [m.handoff for m in measurements] == ["other"]


def test_a_handoff_too_long_for_the_model_is_refused_by_its_id() -> None:
    parts = planted_parts(planted_model(_PLANTED, 1))
    handoffs = [
        replace(planted_handoffs(1)[0], id="long", consumer=Consumer("x" * 1000, "{output_1}"))
    ]

    with pytest.raises(HandoffError, match="hand-off 'long' may need 1099 tokens"):
        Profiler(parts, prompt, handoffs, 64)
