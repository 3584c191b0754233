from __future__ import annotations

import pytest

from relaykv.engine.policy import Bands, Policy, Selection, builtin_policies

RELAY_BANDS = Bands(2, 4, 29)


def test_the_five_policies_of_the_first_release_are_there_by_name() -> None:
    policies = builtin_policies(30, RELAY_BANDS)

    assert list(policies) == ["full", "shift", "epic", "cacheblend", "relay"]
    assert all(policy.name == name for name, policy in policies.items())
    assert [p.name for p in policies.values() if not p.relays] == ["full"]
    assert policies["relay"].bands == RELAY_BANDS


@pytest.mark.parametrize("bands", [(-1, 0, 0), (2, 1, 3), (0, 3, 2)])
def test_bands_that_do_not_rise_are_refused(bands: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="bands must rise"):
        Bands(*bands)


def test_what_a_relayed_token_is_expected_to_cost() -> None:
    policies = builtin_policies(30, RELAY_BANDS)

    assert policies["full"].relay_cost(30) == 1.0
    assert policies["shift"].relay_cost(30) == 0.0
    assert policies["epic"].relay_cost(30) == pytest.approx(0.06)
    assert policies["cacheblend"].relay_cost(30) == pytest.approx((1 + 0.15 * 29) / 30)
    assert policies["relay"].relay_cost(30) == pytest.approx((2 + 0.2 * 26) / 30)


def test_no_policy_costs_more_than_a_full_prefill_at_any_depth() -> None:
    for num_layers in range(1, 40):
        last = num_layers - 1
        for policy in builtin_policies(num_layers, Bands(0, last, last)).values():
            assert 0.0 <= policy.relay_cost(num_layers) <= 1.0
            assert policy.bands is None or policy.bands.stop < num_layers


def test_selecting_everything_in_every_layer_costs_a_full_prefill() -> None:
    policy = Policy("all", True, Bands(0, 0, 7), Selection(expected_share=1.0))

    assert policy.relay_cost(8) == 1.0
