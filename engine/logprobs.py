"""Log-probabilities, computed on the device and brought to the host as plain integers.

Floats travel as their bits beside token ids, so that one copy brings everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaykv.engine.request import TokenLogprob
from relaykv.engine.row_subset import Upload
from relaykv.kernels.readback import start_readback
from relaykv.kernels.sampling import top_logprobs

# Logits looked at together; the intermediate values take about five times their memory.
_MAX_LOGITS_AT_ONCE = 1 << 24


def num_columns(num_top: int) -> int:
    """Integers per row of `pack_logprobs`."""
    return 1 + 2 * num_top


def pack_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Log-probabilities of one token per row and of the likeliest tokens, for the host.

    Args:
        logits: [n, V] fp32, as the model gave them.
        token_ids: [n] int64.
        num_top: k, at most V.

    Returns:
        [n, 1 + 2k] int32: the bits of the token's own, the likeliest ids, the bits of theirs.
    """
    chosen, likeliest, values = top_logprobs(logits, token_ids, num_top)
    columns = [chosen.unsqueeze(-1).view(torch.int32), likeliest.int(), values.view(torch.int32)]
    return torch.cat(columns, dim=-1)


def unpack_logprobs(
    packed: NDArray[np.int32], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """The rows of `pack_logprobs`, each cut to as many alternatives as it asked for.

    Args:
        packed: [n, 1 + 2k].
        token_ids: the n tokens.
        num_top: n numbers; those above k get k.
    """
    k = packed.shape[1] // 2
    ids = packed[:, 1 : 1 + k].tolist()
    values = packed.view(np.float32)
    chosen, others = values[:, 0].tolist(), values[:, 1 + k :].tolist()
    return [
        TokenLogprob(token_id, chosen[i], tuple(zip(ids[i][:num], others[i][:num], strict=True)))
        for i, (token_id, num) in enumerate(zip(token_ids, num_top, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of one prompt whose log-probabilities are wanted."""

    token_ids: Sequence[int]
    num_top: int  # alternatives beside each of them


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities that the device may still be computing."""

    _prompts: Sequence[ScoredTokens]
    _num_columns: int
    _read: Callable[[], Tensor]

    def logprobs(self) -> list[tuple[TokenLogprob, ...]]:
        """Of every prompt's tokens. Waits for the device."""
        packed = self._read().numpy().reshape(-1, self._num_columns)
        result, start = [], 0
        for prompt in self._prompts:
            stop = start + len(prompt.token_ids)
            num_top = [prompt.num_top] * len(prompt.token_ids)
            result.append(tuple(unpack_logprobs(packed[start:stop], prompt.token_ids, num_top)))
            start = stop
        return result


def start_scores(logits: Tensor, prompts: Sequence[ScoredTokens], upload: Upload) -> Scores:
    """Starts computing the log-probabilities of prompts' own tokens, without waiting.

    Args:
        logits: [n, V] fp32, a row for every token, in the prompts' order.
        prompts: n tokens together.
        upload: brings the token ids to the device.

    Raises:
        ValueError: the number of rows differs.
    """
    wanted = [token_id for prompt in prompts for token_id in prompt.token_ids]
    if logits.shape[0] != len(wanted):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(wanted)} tokens")
    num_top = min(max((prompt.num_top for prompt in prompts), default=0), logits.shape[1])
    if not wanted:
        return Scores(prompts, num_columns(num_top), lambda: torch.empty(0, dtype=torch.int32))
    (token_ids,) = upload([np.array(wanted, dtype=np.int64)])
    num_rows = max(1, _MAX_LOGITS_AT_ONCE // logits.shape[1])
    parts = zip(torch.split(logits, num_rows), torch.split(token_ids, num_rows), strict=True)
    packed = torch.cat([pack_logprobs(part, ids, num_top) for part, ids in parts])
    return Scores(prompts, num_columns(num_top), start_readback(packed))
