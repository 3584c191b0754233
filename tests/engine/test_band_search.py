"""Bands of curves whose answer is known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from relaykv.engine.band_search import (
    band_shares,
    find_bands,
    find_inject,
    find_select,
    find_stop,
)
from relaykv.engine.layer_curves import LayerCurves
from relaykv.engine.policy import Bands


def curves(similarity: list[float], correlation: list[float]) -> LayerCurves:
    values = np.array(similarity)
    return LayerCurves(values, values, np.array(correlation))


# As the paper shows it: high, low in the middle, partly recovered and calm at the end.
U_SHAPED = [1.0, 0.998, 0.993, 0.97, 0.93, 0.88, 0.85, 0.87, 0.91, 0.931, 0.935, 0.936, 0.936]
#           0    1      2      3     4     5     6     7     8     9      10     11     12
CLIMBING = [0.0, 0.1, 0.4, 0.8, 0.9, 0.92, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93]
# Growth 0.1 0.3 0.4 0.1: it slows behind layer 3.


def test_a_u_shaped_model_gets_the_bands_of_the_three_rules() -> None:
    # The last five layers: mean 0.9298, deviation 0.0097; from layer 9 on all are above 0.9201
    # and change by less than 0.0194 except 9 itself (0.021): 10 and 11 settle behind layer 9.
    assert find_bands(curves(U_SHAPED, CLIMBING)) == Bands(2, 4, 9)


@pytest.mark.parametrize(
    ("similarity", "inject"),
    [
        ([1.0, 0.995, 0.99, 0.98, 0.9], 2),  # 0.99 itself still counts
        ([1.0, 0.98, 0.97, 0.999, 1.0], 0),  # deep layers that recover do not
        ([1.0, 0.999, 0.998, 0.997], 3),  # nothing deviates
        ([0.9, 1.0, 0.8], 0),
        ([1.0], 0),
    ],
)
def test_inject_is_the_last_layer_of_the_first_run_that_is_similar(
    similarity: list[float], inject: int
) -> None:
    assert find_inject(np.array(similarity)) == inject


def test_a_model_that_never_recovers_is_repaired_to_the_end() -> None:
    assert find_stop(np.linspace(1.0, 0.8, 30)) == 29
    # A minimum three layers from the end leaves three behind it, one later leaves two.
    shallow = [1.0, 0.9, 0.9, 0.9, 0.8, 0.9, 0.9, 0.9]
    assert find_stop(np.array(shallow)) == 5
    assert find_stop(np.array([*shallow[:-1], 0.7])) == 7


def test_a_flat_end_has_settled_although_its_deviation_is_zero() -> None:
    similarity = [1.0, 0.99, 0.9, 0.8, *[0.95] * 8]
    assert find_stop(np.array(similarity)) == 4  # 5 and 6 do not change; 4 is what rises


def test_a_constant_curve_asks_for_nothing() -> None:
    bands = find_bands(curves([1.0] * 12, [0.0, *[1.0] * 11]))
    assert bands == Bands(11, 11, 11)


def test_an_end_that_swings_moves_stop_to_where_two_layers_are_calm() -> None:
    # The last five: mean 0.90, deviation 0.0253, so the bound is 0.875 and a change is calm
    # below 0.051. 7 (0.06 above 6) and 9 (0.07 above 8) are not calm, 8 is not high enough.
    similarity = [1.0, 0.97, 0.9, 0.8, 0.82, 0.84, 0.86, 0.92, 0.86, 0.93, 0.91, 0.88]
    assert find_stop(np.array(similarity)) == 9


def test_small_noise_on_the_curves_does_not_move_the_bands() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        noisy = LayerCurves(
            np.array(U_SHAPED) + random.normal(0, 2e-4, 13),
            np.array(U_SHAPED),
            np.array(CLIMBING) + random.normal(0, 2e-3, 13),
        )
        assert find_bands(noisy) == Bands(2, 4, 9)


def test_select_follows_the_first_layer_at_which_the_growth_slows() -> None:
    assert find_select(np.array(CLIMBING), inject=1, stop=12) == 4
    # Growth 0.7 0.1 at once: the paper's own lowest answer, 3.
    assert find_select(np.array([0.0, 0.1, 0.8, 0.9, 0.95, 0.96]), inject=1, stop=5) == 3


def test_a_bend_while_the_layers_still_disagree_does_not_count() -> None:
    # Growth 0.05 0.15 0.02 0.5 0.1: the first bend is at 0.2, where no ranking has settled.
    correlation = np.array([0.0, 0.05, 0.2, 0.22, 0.72, 0.82, 0.85, 0.86])
    assert find_select(correlation, inject=1, stop=7) == 5


def test_select_stays_between_inject_and_stop() -> None:
    assert find_select(np.array(CLIMBING), inject=6, stop=12) == 7
    assert find_select(np.array(CLIMBING), inject=0, stop=3) == 3
    assert find_select(np.array(CLIMBING), inject=12, stop=12) == 12


def test_without_a_bend_select_is_where_the_correlation_is_nearly_at_its_best() -> None:
    always = np.array([0.0, *[0.95] * 9])
    assert find_select(always, inject=2, stop=9) == 3
    ever_faster = np.array([0.0, 0.01, 0.04, 0.09, 0.16, 0.25, 0.36, 0.49, 0.64, 0.81])
    assert find_select(ever_faster, inject=1, stop=9) == 9
    assert find_select(np.full(6, -0.1), inject=0, stop=5) == 1


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_models_of_any_depth_get_bands_inside_them(num_layers: int) -> None:
    random = np.random.default_rng(num_layers)
    for _ in range(200):
        similarity = 1.0 - np.abs(random.normal(0, 0.05, num_layers))
        correlation = random.uniform(-1, 1, num_layers)
        bands = find_bands(LayerCurves(similarity, similarity, correlation))
        assert 0 <= bands.inject <= bands.select <= bands.stop < num_layers


def test_the_share_of_draws_tells_a_firm_bound_from_a_doubtful_one() -> None:
    firm = [curves(U_SHAPED, CLIMBING)] * 6
    bands = Bands(2, 4, 9)
    shares = band_shares(firm, bands)
    assert (shares.inject, shares.select, shares.stop) == (1.0, 1.0, 1.0)

    # Half of the hand-offs put layer 2 just above the bound, half just below it.
    doubtful = [
        curves([*U_SHAPED[:2], value, *U_SHAPED[3:]], CLIMBING) for value in (0.986, 0.995) * 4
    ]
    shares = band_shares(doubtful, find_bands(doubtful[1]))
    assert 0.3 < shares.inject < 0.9
    assert shares.stop == 1.0
    assert band_shares(doubtful, find_bands(doubtful[1])) == shares
