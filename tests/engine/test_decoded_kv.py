"""Gates on the default model: where relayed KV must be exact, its predictions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from relaykv.engine.assembly import EngineParts, build_core, prepare
from relaykv.engine.divergence import kl_divergence
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.policy_reader import PolicyReader
from relaykv.engine.producers import serve
from relaykv.engine.request import GenerateRequest, RelayOptions, SamplingParams

pytestmark = pytest.mark.model

_SESSION = "gates"
_ANSWER_TOKENS = 16
_ALL = Policy(
    "all", True, Bands(0, 1, 29), Selection(deviation=Deviation.COSINE, deviation_share=1.0)
)
_POLICIES = ("shift", "epic", "cacheblend", "relay", "all")


class Handover:
    """An idle engine whose session holds one answer, and prompts that read it."""

    def __init__(self, parts: EngineParts) -> None:
        parts = replace(parts, policies={**parts.policies, "all": _ALL})
        core = build_core(parts)
        self.encode = parts.tokenizer.encode
        self.prompt = self.encode(
            "<|im_start|>user\nWhy do tides rise and fall?<|im_end|>\n<|im_start|>assistant\n"
        )
        request = GenerateRequest(
            "producer",
            tuple(self.prompt),
            SamplingParams(70, 0.0, ignore_eos=True),
            RelayOptions(session=_SESSION, policy="full"),
        )
        outputs = serve(core, [request])["producer"]
        self.output = [token for output in outputs for token in output.token_ids]
        self._reader = PolicyReader(core, _POLICIES, parts.relay.min_segment_tokens)
        self._reader.share(_SESSION)

    def divergences(self, head: Sequence[int]) -> dict[str, float]:
        """Mean divergence from the full prefill by policy, of `head`, the answer and a request."""
        text = "<|im_end|>\n<|im_start|>user\nSay it shorter.<|im_end|>\n<|im_start|>assistant\n"
        prompts = {_SESSION: [*head, *self.output, *self.encode(text)]}
        full = self._reader.read_full(prompts, _ANSWER_TOKENS)
        readings = self._reader.read(prompts, full)[_SESSION]
        assert all(r.num_matched >= len(self.output) - 1 for r in readings.values())
        reference = full[_SESSION].log_probs
        return {p: float(kl_divergence(reference, r.log_probs).mean()) for p, r in readings.items()}


@pytest.fixture(scope="module")
def handover(default_model_dir: Path) -> Handover:
    assert default_model_dir.is_dir()
    return Handover(prepare(EngineOptions(kv_memory_bytes=1 << 29)))


def test_behind_the_producers_own_prefix_decoded_kv_predicts_like_a_prefill(
    handover: Handover,
) -> None:
    # The gate is 0.01; in fp32 only the order of summation differs.
    assert max(handover.divergences(handover.prompt).values()) < 1e-6


def test_recomputing_all_of_a_segment_predicts_like_a_prefill(handover: Handover) -> None:
    head = handover.encode("<|im_start|>system\nYou are brief.<|im_end|>\n")
    divergences = handover.divergences(head)
    assert divergences["all"] < 1e-6
    assert divergences["shift"] > 1e-4
