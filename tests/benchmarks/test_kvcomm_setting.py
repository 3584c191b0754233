from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvcomm_setting import POLICIES, Sample, format_reuse, format_table, run
from model_shapes import toy_llama
from paper_setups import Setup, kvcomm
from random_model import CoreSizes, core_parts, random_model

from relaykv.engine.assembly import EngineParts, build_core
from relaykv.engine.config import DeviceConfig

SMALL = replace(kvcomm(), num_prefix=32, num_question=48, num_output=40, agents=(1, 2, 3))


def parts(**relay: float) -> EngineParts:
    shape = toy_llama()
    model = random_model(shape, torch.float32, torch.device("cpu"))
    sizes = CoreSizes(max_model_len=1024, num_kv_tokens=16384)
    made = core_parts(model, shape, sizes, DeviceConfig())
    changed = replace(made.relay, num_offsets=64, **relay)  # type: ignore[arg-type]
    return replace(made, relay=changed)


def segments(samples: list[Sample], policy: str, number: int) -> list[tuple[int, int]]:
    """Found and relayed ones of every agent."""
    mine = [s for s in samples if (s.policy, s.number) == (policy, number)]
    return [(s.num_segments, s.num_relayed_segments) for s in mine]


def test_the_first_two_questions_are_computed_and_later_ones_relayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = parts(anchor_entropy=1.0, min_anchors=2)
    samples = run(build_core(made), made, SMALL, num_samples=3, num_cold=2)
    for number in range(3):  # the second agent reads the question and a text, the third two
        assert segments(samples, "shift", number) == [(0, 0), (2, 2), (3, 3)]
        assert segments(samples, "full", number) == [(0, 0)] * 3
    for number in range(2):
        assert segments(samples, "kvcomm", number) == [(0, 0), (2, 0), (3, 0)]
    assert segments(samples, "kvcomm", 2) == [(0, 0), (2, 2), (3, 3)]
    assert segments(samples, "learned", 2) == [(0, 0), (2, 0), (3, 0)]
    printed = capsys.readouterr().out
    assert "in 10 anchors (0 had no room)" in printed
    assert "for the same 5 kinds of hand-offs" in printed


def sample(policy: str, number: int, seconds: float, relayed: int) -> Sample:
    return Sample(1, policy, number, seconds, 2, relayed, 100, 50 * relayed)


def test_the_tables_give_ratios_of_medians_and_shares() -> None:
    samples = [
        sample(policy, number, 9.0 if number == 0 else seconds, relayed)
        for policy, seconds, relayed in (
            ("full", 4.0, 0),
            ("shift", 1.0, 2),
            ("kvcomm", 2.0, 1),
            ("learned", 4.0, 0),
        )
        for number in range(3)
    ]
    one: Setup = replace(SMALL, agents=(1,))
    rows = format_table(samples, one, num_cold=1).splitlines()
    assert rows[3].split() == ["1", "kvcomm", "2000.0", "2.00", "1.11", "50%"]
    assert len(rows) == 2 + len(POLICIES)
    reuse = format_reuse(samples, num_cold=1).splitlines()
    assert "calls  0.0%, segments 50.0%, tokens 50.0%" in reuse[3]
    assert "from sample 2 on" in reuse[3]
