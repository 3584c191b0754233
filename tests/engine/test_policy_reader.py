"""Answers forced through policies' caches, on a tiny random model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_core import ids, request, run, tiny_parts

from relaykv.engine.assembly import build_core
from relaykv.engine.core import EngineCore
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.policy_reader import PolicyReader

_ALL = Policy(
    "all", True, Bands(0, 0, 2), Selection(deviation=Deviation.COSINE, deviation_share=1.0)
)
_MIN = 32


def engine() -> EngineCore:
    parts = tiny_parts(num_blocks=512)
    return build_core(replace(parts, policies={**parts.policies, "all": _ALL}))


def hand_over(core: EngineCore, session: str = "s", seed: int = 1) -> list[int]:
    """Lets a producer write 60 tokens in a session; a prompt that reads them elsewhere."""
    (written,) = run(core, request(f"{session}/0", ids(seed, 30), 60, session, "full"))
    return [*ids(seed + 1, 21), *written.token_ids, *ids(seed + 2, 11)]


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    return float((reference.exp() * (reference - other)).sum(dim=-1).mean())


def test_the_full_reading_is_the_greedy_answer_with_its_end() -> None:
    core = engine()
    prompt = hand_over(core)
    reader = PolicyReader(core, ["shift"], _MIN)

    full = reader.read_full({"s": prompt}, 12)["s"]

    (expected,) = run(engine(), request("other", prompt, 12, ignore_eos=False))
    assert list(full.choices[: len(expected.token_ids)]) == expected.token_ids
    assert full.text == expected.text
    assert full.log_probs.shape == (len(full.choices), 160)
    torch.testing.assert_close(full.log_probs.exp().sum(dim=-1), torch.ones(len(full.choices)))


def test_a_policy_that_computes_everything_again_reads_as_a_full_prefill() -> None:
    core = engine()
    prompt = hand_over(core)
    reader = PolicyReader(core, ["shift", "all"], _MIN)
    reader.share("s")

    full = reader.read_full({"s": prompt}, 12)["s"]
    readings = reader.read({"s": prompt}, {"s": full})["s"]

    assert readings["all"].choices == full.choices
    assert abs(kl(full.log_probs, readings["all"].log_probs)) < 1e-5
    assert kl(full.log_probs, readings["shift"].log_probs) > 1e-3
    # 59 of the 60 tokens have KV: the last was never fed to the model.
    assert {reading.num_matched for reading in readings.values()} == {59}
    assert readings["all"].relay.recomputed_share == 1.0
    assert readings["shift"].relay.recomputed_share == 0.0
    assert readings["shift"].relay.num_relayed_tokens == 59


def test_likeliest_tokens_and_greedy_decoding_agree_up_to_the_first_difference() -> None:
    core = engine()
    policies = ["shift", "epic", "cacheblend", "relay"]
    reader = PolicyReader(core, policies, _MIN)
    differed = 0
    for number in range(3):
        session = f"s{number}"
        prompt = hand_over(core, session, 10 * number + 1)
        reader.share(session)
        full = reader.read_full({session: prompt}, 12)[session]
        readings = reader.read({session: prompt}, {session: full})[session]
        for policy, reading in readings.items():
            common = _num_common(reading.choices, full.choices)
            differed += common < len(full.choices)
            decoded = reader.answers(session, prompt, [policy], 12)[policy].split()
            known = [str(token) for token in reading.choices[: common + 1] if token != 2]
            assert decoded[: len(known)] == known
    assert differed > 0


def test_no_policy_hits_what_another_one_or_the_full_prefill_has_computed() -> None:
    core = engine()
    prompt = hand_over(core)
    reader = PolicyReader(core, ["all", "shift"], _MIN)
    reader.share("s")
    full = reader.read_full({"s": prompt}, 4)["s"]

    readings = reader.read({"s": prompt}, {"s": full})["s"]

    assert {r.relay.num_prefix_tokens for r in readings.values()} == {0}
    assert readings["shift"].relay.num_recomputed_tokens == 0
    later = PolicyReader(core, ["epic"], _MIN)
    later.share("s")
    assert later.read({"s": prompt}, {"s": full})["s"]["epic"].relay.num_prefix_tokens == 0


def test_a_prompt_that_is_kept_is_relayed_into_the_next_one() -> None:
    core = engine()
    reader = PolicyReader(core, ["shift"], _MIN)
    first = ids(1, 50)
    full = reader.read_full({"s": first}, 40)["s"]
    kept = reader.read({"s": first}, {"s": full}, keep=True)["s"]["shift"]
    assert kept.num_matched == 0

    second = [*ids(2, 20), *first, *ids(3, 20)]
    full = reader.read_full({"s": second}, 8)["s"]
    reading = reader.read({"s": second}, {"s": full})["s"]["shift"]

    assert reading.num_matched == 50
    assert reading.relay.num_relayed_tokens == 50
    reader.forget("s")
    assert core.stats().num_recorded_blocks == 0


def test_what_nobody_has_shared_is_computed() -> None:
    core = engine()
    prompt = hand_over(core)
    reader = PolicyReader(core, ["shift"], _MIN)
    full = reader.read_full({"s": prompt}, 4)["s"]

    reading = reader.read({"s": prompt}, {"s": full})["s"]["shift"]

    assert reading.num_matched == 0
    assert reading.choices == full.choices
    assert kl(full.log_probs, reading.log_probs) == pytest.approx(0.0, abs=1e-6)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
