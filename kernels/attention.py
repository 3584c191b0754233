"""The seam between the model and attention over the paged KV cache.

Shaped like FlashInfer's paged wrappers: `prepare` once for a set of rows, then `run` once per
layer. A row is one query token at a position; its request's rows need not be contiguous, because a
relayed prompt computes some tokens and skips others. So causality is stated per row,
`kv_position <= row_position`, and never as "the last n positions of the request".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows of several requests and the blocks that hold their keys and values."""

    row_indptr: tuple[int, ...]  # rows of request r are [row_indptr[r], row_indptr[r + 1])
    row_positions: Tensor  # int64 [rows], rising within a request
    block_indptr: tuple[int, ...]  # blocks of request r likewise in `block_ids`
    block_ids: Tensor  # int64 [blocks]
    counts_influence: tuple[bool, ...]  # per request: report the attention its tokens receive

    @property
    def num_requests(self) -> int:
        return len(self.row_indptr) - 1


@dataclass(frozen=True, slots=True)
class Influence:
    """Attention probability that tokens received, summed over heads and layers.

    (RelayCaching, Eq. 6: one decoding step of one request.)
    """

    slots: Tensor  # int64 [kv]
    received: Tensor  # fp32 [kv]


PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[PlanT]):
    """Attention over paged keys and values; one plan serves every layer with the same rows."""

    def prepare(self, batch: AttentionBatch) -> PlanT:
        """Builds index arrays and masks for a set of rows."""
        ...

    def run(self, plan: PlanT, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attends every row to the keys of its request at or before its position.

        Args:
            q: [rows, heads, head dim].
            k_cache, v_cache: one layer, [slots, kv heads, head dim]; the rows' own keys and
                values are already stored.

        Returns:
            [rows, heads, head dim], of q's type.
        """
        ...

    def influence(self, plan: PlanT) -> list[Influence]:
        """What the tokens of requests that count influence received in all runs of a plan."""
        ...
