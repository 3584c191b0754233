"""The whole engine through FlashInfer's Python wrappers, on a CPU.

Only FlashInfer's compiled modules are replaced, by one that checks its raw arguments and computes
attention in torch. So these tests show that the engine asks FlashInfer for the right thing; that a
GPU then computes it is not shown here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from handoff_run import Limits, read, write
from tiny_core import Result
from torch import Tensor

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.config import SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.handoff import Handoff, shipped_handoffs
from relaykv.engine.options import EngineOptions
from relaykv.kernels.attention import AttentionBackend
from relaykv.kernels.attention_torch import TorchAttention, TorchAttentionPlan

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

if TYPE_CHECKING:
    from relaykv.kernels.attention_flashinfer import FlashInferAttention

pytestmark = pytest.mark.model
# `full` is last: its blocks are exact, and later readers would hit them instead of relaying.
_POLICIES = ("shift", "epic", "cacheblend", "relay", "full")
# Below this gap between the two likeliest tokens, rounding may choose either.
_TIE = 0.05


@pytest.fixture(autouse=True)
def _flashinfer() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed: make setup-kernels")


def _parts(dtype: str) -> EngineParts:
    options = EngineOptions(dtype=dtype, device="cpu", kv_memory_bytes=1 << 30)
    parts = prepare(options)
    # Logits of 16 and more are 0.125 apart in bf16: in fp32, only ties are ties.
    parts.model._head = parts.model._head.float()
    return replace(parts, scheduler=SchedulerConfig(2048, 32, 2048))


def _attention(parts: EngineParts, stock_module: bool = False) -> FlashInferAttention:
    from relaykv.kernels.attention_flashinfer import FlashInferAttention

    config = parts.model.config
    return FlashInferAttention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        parts.cache.block_size,
        parts.model.dtype,
        parts.model.device,
        add_influence=parts.model.kernels.add_influence,
        stock_module=stock_module,
    )


@contextmanager
def _attending_with(core: EngineCore, attention: AttentionBackend[Any, Any]) -> Iterator[None]:
    """Changes a core's attention for a while."""
    forward_pass = core.runner.forward_pass
    before = forward_pass._attention
    forward_pass._attention = attention
    try:
        yield
    finally:
        forward_pass._attention = before


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two ways to attend gave the same greedy answers."""

    num_equal: int  # tokens before the first one that differs, over all answers
    num_tokens: int
    widest_gap: float  # between the two likeliest tokens where answers part; 0 if none do

    @classmethod
    def of(cls, expected: list[Result], actual: list[Result]) -> Agreement:
        num_equal, widest = 0, 0.0
        for one, other in zip(expected, actual, strict=True):
            pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
            place = next((place for place, (a, b) in pairs if a != b), None)
            num_equal += len(one.token_ids) if place is None else place
            if place is not None:
                (logprob,) = one.outputs[place].logprobs
                (_, best), (_, second) = logprob.top
                widest = max(widest, best - second)
        return cls(num_equal, sum(len(one.token_ids) for one in expected), widest)

    def __str__(self) -> str:
        return f"{self.num_equal} of {self.num_tokens} equal, widest gap {self.widest_gap:.3f}"


class WideTorchAttention(TorchAttention):
    """Attention in fp32 on what a 16-bit cache holds: as right as the torch backend, or more."""

    def run(
        self,
        plan: TorchAttentionPlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        received: Tensor | None,
    ) -> Tensor:
        wide = super().run(plan, q.float(), k_cache.float(), v_cache.float(), received)
        return wide.to(q.dtype)


def _readings(
    number: int, dtype: str, handoffs: Sequence[Handoff], limits: Limits
) -> list[_Reading]:
    """Cores with the same recordings, so that they only differ by who attends in reading."""
    parts = _parts(dtype)
    readings = [_Reading(build_core(parts), parts, handoffs, limits) for _ in range(number)]
    assert all(reading.texts == readings[0].texts for reading in readings)
    return readings


class _Reading:
    """A core that holds what the writers of hand-offs wrote, and its readers."""

    def __init__(
        self, core: EngineCore, parts: EngineParts, handoffs: Sequence[Handoff], limits: Limits
    ) -> None:
        self.core = core
        self.parts = parts
        self.texts = write(core, parts, handoffs, limits)
        self._handoffs = handoffs
        self._limits = limits

    def read(self, policy: str) -> list[Result]:
        return read(self.core, self.parts, self._handoffs, self.texts, policy, self._limits)


@pytest.mark.parametrize(("dtype", "policy"), [("bfloat16", "relay"), ("float16", "epic")])
def test_a_relayed_answer_is_the_one_of_the_torch_backend(dtype: str, policy: str) -> None:
    from flashinfer_stand_in import flashinfer_stand_in

    plain, other = _readings(2, dtype, shipped_handoffs()[:1], Limits(40, 8))
    expected = plain.read(policy)

    with flashinfer_stand_in(), _attending_with(other.core, _attention(other.parts)):
        actual = other.read(policy)

    assert Agreement.of(expected, actual).widest_gap < _TIE
    assert expected[0].relay == actual[0].relay
    assert actual[0].relay.num_recomputed_tokens > 0


@pytest.mark.slow
def test_twenty_handoffs_are_answered_alike_under_every_policy() -> None:
    from flashinfer_stand_in import flashinfer_stand_in

    plain, other = _readings(2, "float16", shipped_handoffs()[:20], Limits(64, 24))
    for policy in _POLICIES:
        expected = plain.read(policy)
        with flashinfer_stand_in(), _attending_with(other.core, _attention(other.parts)):
            actual = other.read(policy)
        agreement = Agreement.of(expected, actual)
        print(f"\nfloat16 {policy}: {agreement}")
        assert agreement.widest_gap < _TIE
        assert agreement.num_equal > 0.9 * agreement.num_tokens
        relayed = [r.relay.num_relayed_tokens + r.relay.num_recomputed_tokens for r in actual]
        assert all(relayed) == (policy != "full")


@pytest.mark.slow
def test_in_bfloat16_answers_part_no_sooner_than_rounding_alone_makes_them() -> None:
    from flashinfer_stand_in import flashinfer_stand_in

    plain, other, third = _readings(3, "bfloat16", shipped_handoffs()[:20], Limits(64, 24))
    num_equal = num_equal_of_control = 0
    for policy in _POLICIES:
        expected = plain.read(policy)
        with flashinfer_stand_in(), _attending_with(other.core, _attention(other.parts)):
            agreement = Agreement.of(expected, other.read(policy))
        control = _control(third, policy, expected)
        print(f"\nbfloat16 {policy}: {agreement}; torch in fp32 instead: {control}")
        num_equal += agreement.num_equal
        num_equal_of_control += control.num_equal
    # One answer that parts early costs 24 tokens of 2,400, so only the sum says something.
    assert num_equal >= 0.95 * num_equal_of_control


def _control(third: _Reading, policy: str, expected: list[Result]) -> Agreement:
    """How far rounding alone moves bf16 answers: 8 bits of mantissa against fp16's 11."""
    config = third.parts.model.config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    with _attending_with(third.core, WideTorchAttention(*shape, 16, torch.float32)):
        return Agreement.of(expected, third.read(policy))
