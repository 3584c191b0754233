"""The tensors that blocks stand for: keys, values, and what a relay needs beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relaykv.engine.config import CacheConfig, ModelConfig
from relaykv.kernels.attention import IntArray


class KVCache:
    """Paged storage of every layer. Owned by the model runner.

    A slot is one token's place: `block_id * block_size + offset`. The first axes are flat slots,
    so that a gather over a request's slots is one `index_select`.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # One block more than can be handed out, for rows that only fill up a batch.
        num_slots = cache.num_slots + cache.block_size
        shape = (model.num_layers, num_slots, model.num_kv_heads, model.head_dim)
        self.block_size = cache.block_size
        self.scratch_block = cache.num_blocks
        self.device = device
        # Zeros, not empty: a masked slot must not hold a NaN. [layers, slots, kv heads, head dim]
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        # The hidden state that enters the policy's injection layer. [slots, hidden size]
        self.hidden = torch.zeros((num_slots, model.hidden_size), dtype=dtype, device=device)
        # The attention a token has received from tokens decoded behind it. [slots]
        self.influence = torch.zeros(num_slots, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
        """Memory of one slot over all tensors."""
        kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        return (kv + model.hidden_size) * dtype.itemsize + torch.float32.itemsize

    def flat_slots(self, block_ids: Sequence[int], start: int, num_tokens: int) -> IntArray:
        """Slots of positions [start, start + num_tokens) of a sequence, on the host."""
        positions = np.arange(start, start + num_tokens)
        blocks = np.array(block_ids, dtype=np.int64)[positions // self.block_size]
        slots: IntArray = blocks * self.block_size + positions % self.block_size
        return slots

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots of positions [start, stop) of a sequence, int64 [stop - start]."""
        first = start // self.block_size
        last = -(-stop // self.block_size)
        ids = torch.tensor(block_ids[first:last], dtype=torch.int64, device=self.device)
        offsets = torch.arange(self.block_size, device=self.device)
        flat = (ids[:, None] * self.block_size + offsets).flatten()
        return flat[start - first * self.block_size : stop - first * self.block_size]
