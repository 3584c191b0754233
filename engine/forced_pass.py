"""A forward pass that keeps what requests' tokens are chosen by, and makes given tokens certain."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from relaykv.engine.batch import RecomputeCount
from relaykv.engine.forward_batch import ForwardBatch
from relaykv.engine.forward_pass import ForwardPass
from relaykv.engine.model_runner import ModelRunner
from relaykv.kernels.attention import IntArray

_CERTAIN = 1e4  # above every other logit; finite in every type


class ForcedPass:
    """Stands in for a runner's forward pass and does the same.

    So an answer that is known goes through the engine as if it had just been decoded: whatever
    serves the prompt, the logits at every position of the answer can be read. Answers are decoded
    greedily and, on a CUDA device, without graphs, which would bypass this.
    """

    def __init__(self, inner: ForwardPass) -> None:
        self._inner = inner
        self._forced: dict[str, Sequence[int]] = {}
        self._logits: dict[str, list[Tensor]] = {}
        self._to_write: dict[str, deque[int]] = {}  # the tokens that are left

    def watch(self, request_id: str, forced: Sequence[int] | None = None) -> None:
        """Keeps the logits of a request to come, and makes it answer `forced`."""
        self._logits[request_id] = []
        if forced is not None:
            self._forced[request_id] = tuple(forced)

    def force(self, request_id: str, forced: Sequence[int]) -> None:
        """Makes a request to come answer `forced`, all of it, and keeps nothing."""
        self._to_write[request_id] = deque(forced)

    def take(self, request_id: str) -> list[Tensor]:
        """What a watched request's tokens were chosen by, fp32 [vocab] each; forgets it."""
        self._forced.pop(request_id, None)
        return self._logits.pop(request_id)

    def run(
        self,
        batch: ForwardBatch,
        sampled_before: tuple[Tensor, IntArray] | None = None,
        counts_influence: bool = True,
    ) -> tuple[Tensor, Mapping[str, RecomputeCount]]:
        """As `ForwardPass.run`; the logits of forced requests are changed."""
        logits, counts = self._inner.run(batch, sampled_before, counts_influence)
        for row, request_id in enumerate(batch.sample_request_ids):
            to_write = self._to_write.get(request_id)
            if to_write is not None:
                logits[row, to_write.popleft()] = logits[row].max() + _CERTAIN
                if not to_write:
                    del self._to_write[request_id]
                continue
            kept = self._logits.get(request_id)
            if kept is None:
                continue
            place = len(kept)
            kept.append(logits[row].to(torch.float32, copy=True))
            forced = self._forced.get(request_id)
            if forced is not None:
                logits[row, forced[place]] = logits[row].max() + _CERTAIN
        return logits, counts


def forced_pass_of(runner: ModelRunner) -> ForcedPass:
    """A runner's forward pass, changed to a forced one for good."""
    current: object = runner.forward_pass
    if isinstance(current, ForcedPass):
        return current
    forced = ForcedPass(runner.forward_pass)
    # It takes the place of what the runner was built with, by the one method that it calls.
    runner.forward_pass = cast(ForwardPass, forced)
    return forced
