"""The order of fidelity on the default model: repair is worth what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from fidelity import Fidelity, Row, policies_to_score, table
from handoffs import load_handoffs

from relaykv.engine.assembly import prepare
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands
from relaykv.server.chat_template import HuggingFaceTemplate

_HANDOFFS = Path(__file__).parents[2] / "benchmarks" / "handoffs.json"
_NUM_HANDOFFS = 12


@pytest.fixture(scope="module")
def rows(default_model_dir: Path) -> list[Row]:
    assert default_model_dir.is_dir()
    parts = prepare(EngineOptions(kv_memory_bytes=1 << 30))
    template = HuggingFaceTemplate.from_folder(parts.folder)
    fidelity = Fidelity(parts, template, max_tokens=220)
    # Those with two producers stand last; both kinds are needed.
    handoffs = load_handoffs(_HANDOFFS)[-_NUM_HANDOFFS:]
    texts = fidelity.write(handoffs)
    policies = policies_to_score(parts, [])
    return [
        row
        for handoff in handoffs
        for row in fidelity.score(handoff, texts[handoff.id], policies, 32)
    ]


def _mean_kl(rows: Sequence[Row], policy: str) -> float:
    return statistics.fmean(row.kl_mean for row in rows if row.policy == policy)


@pytest.mark.model
@pytest.mark.slow
def test_every_repairing_policy_is_nearer_to_full_prefill_than_shift(rows: list[Row]) -> None:
    print(table(rows))
    shift = [row for row in rows if row.policy == "shift"]
    assert len(shift) == _NUM_HANDOFFS
    assert {row.num_segments for row in shift} >= {1, 2}
    assert all(row.num_generated_tokens >= 200 for row in shift)
    assert all(row.num_relayed_tokens >= 0.95 * row.num_generated_tokens for row in shift)
    assert _mean_kl(rows, "full") < 1e-6
    for policy in ("epic", "cacheblend", "relay"):
        assert _mean_kl(rows, policy) < _mean_kl(rows, "shift")
    assert _mean_kl(rows, "relay") <= 0.5 * _mean_kl(rows, "shift")


@pytest.mark.model
def test_bands_that_inject_where_no_hidden_state_is_kept_are_refused(
    default_model_dir: Path,
) -> None:
    assert default_model_dir.is_dir()
    parts = prepare(EngineOptions(kv_memory_bytes=1 << 28))
    with pytest.raises(ValueError, match="hidden states are kept at layer 2"):
        policies_to_score(parts, [Bands(1, 3, 18)])
