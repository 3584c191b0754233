"""Owns the device: executes scheduled batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from relaykv.engine.anchor_offsets import add_anchors, anchor_distances, store_anchors
from relaykv.engine.batch import (
    AnchorQuery,
    AnchorRecord,
    ModelRunnerOutput,
    Observation,
    PendingErrors,
    PendingStep,
    RecomputeCount,
    RelayCopy,
    ScheduledBatch,
)
from relaykv.engine.config import DeviceConfig
from relaykv.engine.decode_graphs import DecodeGraphs
from relaykv.engine.forward_batch import ForwardBatch, ForwardBatchBuilder, in_row_order
from relaykv.engine.forward_pass import ForwardPass
from relaykv.engine.grammar import GrammarMatchers
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.logprobs import ScoredTokens, Scores
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.offset_memory import OffsetMemory
from relaykv.engine.relay import relay
from relaykv.engine.sampler import SampledRows, Sampler
from relaykv.kernels.attention import AttentionBackend
from relaykv.kernels.sampling import cpu_filters, cuda_filters
from relaykv.kernels.staging import Staging


@dataclass(frozen=True, slots=True)
class _Step:
    """What a launched step leaves to be read."""

    request_ids: tuple[str, ...]  # whose tokens are sampled
    sampled: SampledRows | None = None
    recomputed: Mapping[str, RecomputeCount] = field(default_factory=dict)
    scored_request_ids: tuple[str, ...] = ()
    scores: Scores | None = None

    def result(self) -> ModelRunnerOutput:
        if self.sampled is None or self.scores is None:
            return ModelRunnerOutput({}, {})
        sampled = dict(zip(self.request_ids, self.sampled.tokens(), strict=True))
        scored = dict(zip(self.scored_request_ids, self.scores.logprobs(), strict=True))
        return ModelRunnerOutput(sampled, self.recomputed, scored)


@dataclass(slots=True)
class _Watch:
    """Logits of a request's first tokens, on the device."""

    num_positions: int
    logits: list[Tensor] = field(default_factory=list)

    def keep(self, logits: Tensor) -> None:
        if len(self.logits) < self.num_positions:
            self.logits.append(logits.clone())


class ModelRunner:
    """Model, KV cache, attention backend and sampler of one device.

    Everything on the device is ordered on one stream, so a step may be launched while the one
    before it is running: it reads and writes the cache behind it.

    Attributes:
        cache, forward_pass: for tools that measure, which use them between two steps.
        offsets: what recurring hand-offs have lacked; as the cache.
        grammars: of constrained decoding; None when the engine has none.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        attention: AttentionBackend[Any, Any],
        hidden_layer: int,
        grammars: GrammarMatchers | None = None,
        device: DeviceConfig | None = None,
        num_offsets: int = 0,
    ) -> None:
        """`num_offsets`: how many mean offsets of recurring hand-offs there is room for."""
        filters = cuda_filters() if cache.device.type == "cuda" else cpu_filters()
        device = device or DeviceConfig()
        self._model = model
        self._inv_freq = model.inv_freq.numpy()
        self.cache = cache
        self.offsets = OffsetMemory(model.config, num_offsets, cache.device)
        self.staging = Staging(cache.device)
        self.forward_pass = ForwardPass(
            model,
            cache,
            attention,
            hidden_layer,
            self.staging,
            model.kernels,
            influence_layer_stride=device.influence_layer_stride,
        )
        self.grammars = grammars
        self._sampler = Sampler(grammars, self.staging.upload, filters)
        self._graphs: DecodeGraphs | None = None
        self._influence_step_stride = device.influence_step_stride
        self._num_steps = 0
        self._watched: dict[str, _Watch] = {}
        self._sampled: tuple[Tensor, Mapping[str, int]] | None = None  # of the step before

    @property
    def num_layers(self) -> int:
        return self._model.config.num_layers

    def watch(self, request_id: str, num_positions: int) -> None:
        """Keeps the logits that a request's next tokens are chosen by, as the model gives them."""
        self._watched[request_id] = _Watch(num_positions)

    def unwatch(self, request_id: str) -> list[Tensor]:
        """The logits that were kept, fp32 [vocab] each; keeps no more."""
        watch = self._watched.pop(request_id, None)
        return [] if watch is None else watch.logits

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """Captures decode steps, and from now on runs those that are covered as graphs."""
        with torch.inference_mode():
            graphs.capture_all(
                lambda keys: tqdm(keys, desc="capturing decode graphs", unit="graph")
            )
        self._graphs = graphs

    @torch.inference_mode()
    def relay(self, copies: Sequence[RelayCopy]) -> None:
        """Brings recorded KV to its place in other prompts."""
        kernels = self._model.kernels
        relay(
            self.cache,
            copies,
            self.offsets.means,
            self._inv_freq,
            self.staging,
            kernels.shift_copy,
            kernels.add_offset,
        )

        anchored = [copy for copy in copies if copy.anchors]
        if anchored:
            add_anchors(self.cache, anchored, self._inv_freq, self.staging, kernels)

    @torch.inference_mode()
    def anchor_distances(self, queries: Sequence[AnchorQuery]) -> list[list[float]]:
        """How far recorded segments lie from their anchors. Waits for all that was launched."""
        return anchor_distances(self.cache, queries, self.staging, self._model.kernels)

    @torch.inference_mode()
    def store_anchors(self, records: Sequence[AnchorRecord]) -> None:
        """Writes what computed segments have more than their recordings. Does not wait."""
        store_anchors(self.cache, records, self._inv_freq, self.staging)

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> PendingErrors:
        """Takes in how computed segments differ from their recordings. Does not wait."""
        return self.offsets.observe(self.cache, observations, self._inv_freq, self.staging)

    def execute(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        """Launches a step and waits for it."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Relay copies, then the forward, then a token for every finished chunk.

        On a CUDA device this returns before any of it is done, except where a policy selects by
        what a layer finds out.
        """
        self.relay(batch.copies)
        batch = in_row_order(batch)
        forward_batch = ForwardBatchBuilder(self.cache, self.num_layers).build(batch)
        if not forward_batch.token_ids.size:
            return _Step(())  # a chunk of relayed tokens only
        logits, recomputed = self._forward(forward_batch)
        rows = [r.sampling for r in batch.requests if r.sampling is not None]
        names = forward_batch.sample_request_ids
        for place, name in enumerate(names):
            if name in self._watched:
                self._watched[name].keep(logits[place])
        sampled = self._sampler.start(logits[: len(rows)], rows)
        self._sampled = (sampled.token_ids, {name: place for place, name in enumerate(names)})
        scored = [r for r in batch.requests if r.scored_token_ids]
        prompts = [ScoredTokens(r.scored_token_ids, r.num_top_logprobs) for r in scored]
        scores = self._sampler.start_scores(logits[len(rows) :], prompts)
        scored_ids = tuple(request.request_id for request in scored)
        return _Step(names, sampled, recomputed, scored_ids, scores)

    def _forward(self, batch: ForwardBatch) -> tuple[Tensor, Mapping[str, RecomputeCount]]:
        before = None
        if batch.unknown_rows.size:
            assert self._sampled is not None
            tokens, places = self._sampled
            unknown = [places[name] for name in batch.unknown_request_ids]
            before = (tokens, np.array(unknown, dtype=np.int64))
        counts_influence = self._num_steps % self._influence_step_stride == 0
        self._num_steps += 1
        if self._graphs is not None and self._graphs.covers(batch):
            return self._graphs.run(batch, before, counts_influence), {}
        return self.forward_pass.run(batch, before, counts_influence)
