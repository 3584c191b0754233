"""Next-token distributions of a given answer on a cache that a policy has put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relaykv.engine.assembly import EngineParts
from relaykv.engine.batch import RelayCopy, ScheduledBatch, ScheduledRequest
from relaykv.engine.core import EngineCore
from relaykv.engine.forward_batch import ForwardBatchBuilder
from relaykv.engine.policy import Policy
from relaykv.engine.prefill_plan import Span, plan_prefill
from relaykv.engine.recording import SessionKey


@dataclass(frozen=True, slots=True)
class Forced:
    """One answer, scored under one policy."""

    log_probs: Tensor  # fp32 [answer tokens, vocab]
    num_prompt_tokens: int
    num_relayed_tokens: int
    num_segments: int
    recomputed_share: float  # of the relayed layer-tokens


class TeacherForcing:
    """Scores answers on an idle engine whose sessions hold the producers' recordings.

    Prompt and answer go through one forward: the answer's rows see the prompt's mixed cache just
    as decoding it token by token would.
    """

    def __init__(self, parts: EngineParts, core: EngineCore) -> None:
        self._min_segment_tokens = parts.relay.min_segment_tokens
        self._block_size = parts.cache.block_size
        self._core = core

    @torch.inference_mode()
    def score(
        self,
        key: SessionKey,
        prompt: Sequence[int],
        answer: Sequence[int],
        policy: Policy,
    ) -> Forced:
        """Log-probabilities at the positions that choose each token of `answer`."""
        tokens = [*prompt, *answer[:-1]]
        segments = self._core.recordings.match(key, list(prompt), 0) if policy.relays else []
        plan = plan_prefill(len(prompt), 0, segments, self._min_segment_tokens, lambda _: policy)
        spans = tuple(plan.relay_spans(0, len(prompt)))
        num_blocks = -(-len(tokens) // self._block_size)
        blocks = self._core.pool.allocate(num_blocks)
        try:
            block_ids = tuple(block.id for block in blocks)
            request = ScheduledRequest(
                request_id="forced",
                start=0,
                stop=len(tokens),
                token_ids=tuple(tokens),
                block_ids=block_ids,
                relay_spans=spans,
                counts_influence=False,
                sampling=None,
            )
            copies = tuple(self._copy(span, block_ids) for span in spans)
            self._core.runner.relay(copies)
            builder = ForwardBatchBuilder(self._core.runner.cache, self._core.runner.num_layers)
            batch = builder.build(ScheduledBatch((request,), copies))
            num_rows = batch.token_ids.size
            rows = tuple(range(num_rows - len(answer), num_rows))
            logits, counts = self._core.runner.forward_pass.run(replace(batch, sample_rows=rows))
        finally:
            self._core.pool.release(blocks)
        num_relayed = sum(span.num_tokens for span in spans)
        layer_tokens = num_relayed * self._core.runner.num_layers
        computed = counts["forced"].num_layer_tokens if counts else 0
        return Forced(
            log_probs=logits.log_softmax(dim=-1),
            num_prompt_tokens=len(prompt),
            num_relayed_tokens=num_relayed,
            num_segments=len(spans),
            recomputed_share=computed / layer_tokens if layer_tokens else 1.0,
        )

    def _copy(self, span: Span, block_ids: tuple[int, ...]) -> RelayCopy:
        segment = span.segment
        assert segment is not None
        recording = self._core.recordings[segment.recording_id]
        return RelayCopy(
            source_block_ids=tuple(block.id for block in recording.blocks),
            source_start=segment.source_start,
            block_ids=block_ids,
            start=span.start,
            num_tokens=span.num_tokens,
        )
