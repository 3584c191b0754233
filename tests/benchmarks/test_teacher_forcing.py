"""Gates on the default model: where relayed KV must be exact, its predictions are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from fidelity import run
from teacher_forcing import TeacherForcing

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.core import EngineCore
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.recording import SessionKey
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams

pytestmark = pytest.mark.model

_KEY = SessionKey("", "gates")
_FULL = Policy("full", relays=False)
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Producer:
    """An idle engine whose session holds one answer, and how to score prompts that read it."""

    parts: EngineParts
    core: EngineCore
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    def kl(self, prompt: tuple[int, ...], policy: Policy) -> float:
        """Mean KL from the full prefill over an answer of this prompt."""
        forcing = TeacherForcing(self.parts, self.core)
        request = GenerateRequest("reader", prompt, SamplingParams(_ANSWER_TOKENS, 0.0))
        answer = run(self.core, [request])["reader"][1]
        full = forcing.score(_KEY, prompt, answer, _FULL)
        other = forcing.score(_KEY, prompt, answer, policy)
        assert other.num_relayed_tokens >= len(self.output) - 1
        kl = full.log_probs.exp() * (full.log_probs - other.log_probs)
        return float(kl.sum(dim=-1).mean())


@pytest.fixture(scope="module")
def producer(default_model_dir: Path) -> Producer:
    assert default_model_dir.is_dir()
    parts = prepare(EngineOptions(kv_memory_bytes=1 << 29))
    core = build_core(parts)
    encode = parts.tokenizer.encode
    prompt = tuple(
        encode("<|im_start|>user\nWhy do tides rise and fall?<|im_end|>\n<|im_start|>assistant\n")
    )
    options = RelayOptions(session="gates", policy="full")
    request = GenerateRequest("producer", prompt, SamplingParams(70, 0.0, ignore_eos=True), options)
    output = run(core, [request])["producer"][1]
    return Producer(parts, core, prompt, output)


def _tail(producer: Producer) -> tuple[int, ...]:
    text = "<|im_end|>\n<|im_start|>user\nSay it shorter.<|im_end|>\n<|im_start|>assistant\n"
    return tuple(producer.parts.tokenizer.encode(text))


@pytest.mark.parametrize("policy", ["shift", "epic", "cacheblend", "relay"])
def test_behind_the_producers_own_prefix_decoded_kv_predicts_like_a_prefill(
    producer: Producer, policy: str
) -> None:
    # The gate is 0.01; in fp32 only the order of summation differs.
    prompt = producer.prompt + producer.output + _tail(producer)
    assert producer.kl(prompt, producer.parts.policies[policy]) < 1e-6


def test_recomputing_all_of_a_segment_predicts_like_a_prefill(producer: Producer) -> None:
    head = tuple(producer.parts.tokenizer.encode("<|im_start|>system\nYou are brief.<|im_end|>\n"))
    prompt = head + producer.output + _tail(producer)
    everything = Selection(deviation=Deviation.COSINE, deviation_share=1.0)
    assert producer.kl(prompt, Policy("all", True, Bands(0, 1, 29), everything)) < 1e-6
    assert producer.kl(prompt, producer.parts.policies["shift"]) > 1e-4
