from __future__ import annotations

import pytest

from relaykv.engine.policy import Bands, Policy, Selection, builtin_policies, find_policy
from relaykv.engine.recompute import select_tokens

RELAY_BANDS = Bands(2, 4, 29)


def test_all_policies_are_there_by_name() -> None:
    policies = builtin_policies(30, RELAY_BANDS)

    published = ["full", "shift", "epic", "cacheblend", "relay", "kvcomm"]
    assert list(policies) == [*published, "learned", "auto", "observe"]
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


@pytest.mark.parametrize("name", ["epic@0.125", "learned@0.125", "auto@0.125", "cacheblend@0.125"])
def test_a_share_in_the_name_is_what_the_policy_costs(name: str) -> None:
    policy = find_policy(builtin_policies(30, RELAY_BANDS), name, 30)

    assert policy.name == name
    assert policy.relay_cost(30) == pytest.approx(0.125)
    for part in (policy.warm, policy.cold):
        assert part is None or part.relay_cost(30) == pytest.approx(0.125)


def test_a_share_says_how_many_tokens_of_a_segment_are_computed() -> None:
    policies = builtin_policies(30, RELAY_BANDS)

    first = find_policy(policies, "epic@0.1", 30).selection
    assert select_tokens(first, 101, None, None) == list(range(11))
    most = find_policy(policies, "cacheblend@0.2", 30).selection
    assert len(select_tokens(most, 145, [float(i) for i in range(145)], None)) == 25


def test_a_share_below_what_checking_takes_leaves_the_checks() -> None:
    policy = find_policy(builtin_policies(30, RELAY_BANDS), "cacheblend@0.01", 30)

    assert policy.relay_cost(30) == pytest.approx(1 / 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "unknown policy 'magic'; known: full, shift"),
        ("magic@0.5", "unknown policy 'magic'"),
        ("shift@0.5", "policy 'shift' takes no share .these do: epic, cacheblend, learned, auto"),
        ("relay@0.5", "policy 'relay' takes no share"),
        ("auto@", "'' is no share of layer-tokens for 'auto': a number above 0, at most 1"),
        ("auto@0", "'0' is no share"),
        ("auto@1.5", "'1.5' is no share"),
        ("auto@nan", "'nan' is no share"),
        ("auto@much", "'much' is no share"),
    ],
)
def test_names_that_are_none_are_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_policy(builtin_policies(30, RELAY_BANDS), name, 30)
