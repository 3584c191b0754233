"""A model on a bare KV cache: recordings and relayed prefills without scheduler or index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relaykv.engine.batch import RecomputeCount, RelayCopy, ScheduledBatch, ScheduledRequest
from relaykv.engine.config import CacheConfig
from relaykv.engine.forward_batch import ForwardBatchBuilder
from relaykv.engine.forward_pass import ForwardPass
from relaykv.engine.kv_cache import KVCache
from relaykv.engine.models.decoder import DecoderModel
from relaykv.engine.policy import Policy
from relaykv.engine.prefill_plan import plan_prefill
from relaykv.engine.relay import relay
from relaykv.engine.segment import Segment
from relaykv.kernels.attention_torch import TorchAttention
from relaykv.kernels.staging import Staging

_FULL = Policy("full", relays=False)


@dataclass(frozen=True, slots=True)
class KV:
    k: Tensor  # [layers, n, kv heads, head dim]
    v: Tensor


class RelayBench:
    """Blocks are handed out once and never taken back."""

    def __init__(self, model: DecoderModel, hidden_layer: int, num_blocks: int = 400) -> None:
        config = model.config
        self.model = model
        self.cache = KVCache(config, CacheConfig(num_blocks), model.dtype, model.device)
        # Block ids out of order, so that a sequence's slots are not contiguous.
        self._free = [(7 * i) % num_blocks for i in range(num_blocks)]
        self._last: tuple[int, ...] = ()
        attention = TorchAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, 16, model.dtype
        )
        self._staging = Staging(model.device)
        self._forward = ForwardPass(
            model, self.cache, attention, hidden_layer, self._staging, model.kernels
        )

    def record(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Computes a sequence in full; its blocks."""
        self.prefill(tokens, [], _FULL)
        return self._last

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        sources: Sequence[tuple[tuple[int, ...], Segment]],
        policy: Policy,
        chunks: Sequence[int] = (),
    ) -> tuple[Tensor, RecomputeCount]:
        """Relays the segments and computes the rest.

        Returns:
            Logits of the rows behind the last segment in the last chunk, and what repair took.
        """
        blocks = self._take(len(tokens))
        plan = plan_prefill(len(tokens), 0, [s for _, s in sources], 1, lambda _: policy)
        for source, segment in sources:
            self._relay(source, blocks, segment)
        offsets: dict[int, tuple[int, ...]] = {}
        num_layer_tokens, start = 0, 0
        logits = torch.empty(0)
        for stop in (*chunks, len(tokens)):
            request = ScheduledRequest(
                request_id="r",
                start=start,
                stop=stop,
                token_ids=tuple(tokens[start:stop]),
                block_ids=blocks,
                relay_spans=tuple(plan.relay_spans(start, stop)),
                counts_influence=False,
                sampling=None,
            )
            builder = ForwardBatchBuilder(self.cache, self.model.config.num_layers)
            batch = builder.build(ScheduledBatch((request,), ()))
            num_rows = batch.token_ids.size
            tail = len(tokens) - (plan.spans[-1].start if sources else 0)
            rows = range(max(num_rows - tail, 0), num_rows) if stop == len(tokens) else ()
            logits, counts = self._forward.run(replace(batch, sample_rows=tuple(rows)))
            if counts:
                offsets.update(counts["r"].offsets)
                num_layer_tokens += counts["r"].num_layer_tokens
            start = stop
        self._last = blocks
        return logits, RecomputeCount(offsets, num_layer_tokens)

    def relay_only(self, source: tuple[int, ...], segment: Segment) -> tuple[int, ...]:
        """Copies a segment to fresh blocks and computes nothing."""
        blocks = self._take(segment.stop)
        self._relay(source, blocks, segment)
        return blocks

    def copy_of(self, source: tuple[int, ...], start: int, shift: int, num_tokens: int) -> KV:
        """KV of a run of tokens after one more relay by `shift`."""
        target = start + shift
        blocks = self._take(target + num_tokens)
        self._relay(source, blocks, Segment(target, target + num_tokens, 0, start))
        return self.kv(blocks, target, target + num_tokens)

    def kv(self, blocks: tuple[int, ...], start: int, stop: int) -> KV:
        slots = self.cache.slots(blocks, start, stop)
        return KV(self.cache.k.index_select(1, slots), self.cache.v.index_select(1, slots))

    def last_kv(self, start: int, stop: int) -> KV:
        """KV of the last prefill."""
        return self.kv(self._last, start, stop)

    def hidden(self, blocks: tuple[int, ...], start: int, stop: int) -> Tensor:
        return self.cache.hidden.index_select(0, self.cache.slots(blocks, start, stop))

    def influence(self, blocks: tuple[int, ...], start: int, stop: int) -> Tensor:
        return self.cache.influence.index_select(0, self.cache.slots(blocks, start, stop))

    @torch.inference_mode()
    def _relay(self, source: tuple[int, ...], blocks: tuple[int, ...], segment: Segment) -> None:
        copy = RelayCopy(source, segment.source_start, blocks, segment.start, segment.num_tokens)
        kernels = self.model.kernels
        relay(
            self.cache,
            [copy],
            torch.zeros(0),  # no copy names an offset
            self.model.inv_freq.numpy(),
            self._staging,
            kernels.shift_copy,
            kernels.add_offset,
        )

    def _take(self, num_tokens: int) -> tuple[int, ...]:
        num_blocks = -(-num_tokens // 16)
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return tuple(taken)
