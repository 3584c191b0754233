"""The whole engine through FlashInfer's Python wrappers, on a CPU.

Only FlashInfer's compiled modules are replaced, by one that checks its raw arguments and computes
attention in torch. So these tests show that the engine asks FlashInfer for the right thing; that a
GPU then computes it is not shown here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from handoff_run import Limits, read, write
from tiny_core import Result

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.config import SchedulerConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.handoff import shipped_handoffs
from relaykv.engine.options import EngineOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

if TYPE_CHECKING:
    from relaykv.kernels.attention_flashinfer import FlashInferAttention

pytestmark = pytest.mark.model
_POLICIES = ("full", "shift", "epic", "cacheblend", "relay")
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
def _attending_with(core: EngineCore, attention: FlashInferAttention) -> Iterator[None]:
    """Changes a core's attention for a while."""
    forward_pass = core.runner.forward_pass
    before = forward_pass._attention
    forward_pass._attention = attention
    try:
        yield
    finally:
        forward_pass._attention = before


def _assert_same_but_for_ties(torch_results: list[Result], flashinfer: list[Result]) -> int:
    """Tokens agree up to where the likeliest two were as good as equal; how many are equal."""
    num_equal = 0
    for expected, actual in zip(torch_results, flashinfer, strict=True):
        assert len(expected.token_ids) == len(actual.token_ids)
        for place, pair in enumerate(zip(expected.token_ids, actual.token_ids, strict=True)):
            if pair[0] != pair[1]:
                (logprob,) = expected.outputs[place].logprobs
                (_, best), (_, second) = logprob.top
                assert best - second < _TIE, f"token {place}: {pair}, gap {best - second:.3f}"
                break
            num_equal += 1
    return num_equal


def _compare(dtype: str, policies: tuple[str, ...], num_handoffs: int, limits: Limits) -> None:
    from flashinfer_stand_in import flashinfer_stand_in

    handoffs = shipped_handoffs()[:num_handoffs]
    parts = _parts(dtype)
    # Both cores hold the same recordings, so that one only differs by who attends when reading.
    plain, other = build_core(parts), build_core(parts)
    texts = write(plain, parts, handoffs, limits)
    assert write(other, parts, handoffs, limits) == texts
    with flashinfer_stand_in(), _attending_with(other, _attention(parts)):
        for policy in policies:
            expected = read(plain, parts, handoffs, texts, policy, limits)
            actual = read(other, parts, handoffs, texts, policy, limits)
            num_equal = _assert_same_but_for_ties(expected, actual)
            num_tokens = num_handoffs * limits.reader
            print(f"{dtype} {policy}: {num_equal} of {num_tokens} tokens before the first tie")
            assert num_equal > 0.5 * num_tokens
            relayed = [result.relay.num_relayed_tokens for result in actual]
            assert all(relayed) == (policy != "full")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_relayed_answer_is_the_one_of_the_torch_backend(dtype: str) -> None:
    _compare(dtype, ("relay", "epic"), 2, Limits(48, 10))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_twenty_handoffs_are_answered_alike_under_every_policy(dtype: str) -> None:
    _compare(dtype, _POLICIES, 20, Limits(64, 24))
