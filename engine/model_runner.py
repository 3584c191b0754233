"""Owns the device: executes one scheduled batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from relaykv.engine.batch import ModelRunnerOutput, RelayCopy, ScheduledBatch
from relaykv.engine.forward_batch import ForwardBatchBuilder
from relaykv.engine.forward_pass import ForwardPass
from relaykv.engine.grammar import GrammarMatchers
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.relay import relay
from relaykv.engine.request import TokenLogprob
from relaykv.engine.sampler import Sampler, token_logprob
from relaykv.kernels.attention import AttentionBackend


class ModelRunner:
    """Model, KV cache, attention backend and sampler of one device.

    Attributes:
        cache, forward_pass: for tools that measure, which use them between two steps.
        grammars: of constrained decoding; None when the engine has none.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        attention: AttentionBackend[Any],
        hidden_layer: int,
        grammars: GrammarMatchers | None = None,
    ) -> None:
        self._model = model
        self.cache = cache
        self.forward_pass = ForwardPass(model, cache, attention, hidden_layer)
        self.grammars = grammars
        self._sampler = Sampler(grammars)

    @property
    def num_layers(self) -> int:
        return self._model.config.num_layers

    @torch.inference_mode()
    def relay(self, copies: Iterable[RelayCopy]) -> None:
        """Brings recorded KV to its place in other prompts."""
        for copy in copies:
            relay(self.cache, copy, self._model.inv_freq)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        """Relay copies, then the forward, then a token for every finished chunk."""
        self.relay(batch.copies)
        builder = ForwardBatchBuilder(self.cache, self.num_layers)
        forward_batch = builder.build(batch)
        if not forward_batch.token_ids.numel():
            return ModelRunnerOutput({}, {})  # a chunk of relayed tokens only
        logits, recomputed = self.forward_pass.run(forward_batch)
        rows = [r.sampling for r in batch.requests if r.sampling is not None]
        tokens = self._sampler.sample(logits[: len(rows)], rows)
        sampled = dict(zip(forward_batch.sample_request_ids, tokens, strict=True))
        return ModelRunnerOutput(sampled, recomputed, _score(batch, logits[len(rows) :]))


def _score(batch: ScheduledBatch, logits: Tensor) -> dict[str, tuple[TokenLogprob, ...]]:
    """Log-probabilities of the prompts' own tokens; logits [scored rows, vocab]."""
    scored = {}
    start = 0
    for request in batch.requests:
        wanted = enumerate(request.scored_token_ids, start)
        start += len(request.scored_token_ids)
        entries = [token_logprob(logits[i], t, request.num_top_logprobs) for i, t in wanted]
        if entries:
            scored[request.request_id] = tuple(entries)
    return scored
