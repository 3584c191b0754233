"""The seam between the model and attention over the paged KV cache.

Shaped like FlashInfer's paged wrappers: index arrays first, then `run` once per layer. A row is
one query token at a position; its request's rows need not be contiguous, because a relayed prompt
computes some tokens and skips others. So causality is stated per row,
`kv_position <= row_position`, and never as "the last n positions of the request".

Laying out happens on the host and names the arrays that the device needs; whoever drives the
backend brings the arrays of all its layouts over in one copy and then prepares the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows of several requests and the blocks that hold their keys and values; on the host.

    Requests stand in this order: `num_decodes` that have one row each and relay nothing, then
    `num_dense` whose rows are the last ones of what their blocks hold without a gap, then those
    whose rows may be scattered, or none.
    """

    row_indptr: IntArray  # rows of request r are [row_indptr[r], row_indptr[r + 1])
    row_positions: IntArray  # [rows], rising within a request
    block_indptr: IntArray  # blocks of request r likewise in `block_ids`
    block_ids: IntArray  # [blocks]
    counts_influence: tuple[bool, ...]  # per request: add up the attention its tokens receive
    num_decodes: int
    num_dense: int

    @property
    def num_requests(self) -> int:
        return len(self.row_indptr) - 1


class AttentionLayout(Protocol):
    """What a backend needs for a set of rows: still on the host."""

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """The int32 or int64 arrays that `prepare` wants on the device."""
        ...


LayoutT = TypeVar("LayoutT", bound=AttentionLayout)
PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[LayoutT, PlanT]):
    """Attention over paged keys and values; one plan serves every layer with the same rows."""

    def layout(self, batch: AttentionBatch) -> LayoutT:
        """Builds index arrays for a set of rows; touches no device."""
        ...

    def prepare(self, layout: LayoutT, tensors: Sequence[Tensor]) -> PlanT:
        """Makes a plan of a layout whose arrays, as `tensors` in the same order, are there.

        A backend may hold few plans at a time: a plan is good until the next one is run.
        """
        ...

    def run(
        self, plan: PlanT, q: Tensor, k_cache: Tensor, v_cache: Tensor, received: Tensor | None
    ) -> Tensor:
        """Attends every row to the keys of its request at or before its position.

        Args:
            q: [rows, heads, head dim].
            k_cache, v_cache: one layer, [slots, kv heads, head dim]; the rows' own keys and
                values are already stored.
            received: fp32 [slots]. The attention probability, summed over heads, that decoding
                rows of requests which count influence give to each slot is added to it
                (RelayCaching, Eq. 6). None: not on this layer.

        Returns:
            [rows, heads, head dim], of q's type.
        """
        ...
