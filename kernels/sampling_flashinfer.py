"""Sampling on a CUDA device: what FlashInfer may do of `sampling`, which is to find top-k.

A row's token must depend on its logits, its seed and its index alone, and of equal logits lower
ids go first. Read against that in FlashInfer 0.7.4:

* `sampling_from_probs`, `sampling_from_logits` and everything that draws: not used. They take a
  seed and an offset per row, but the row's place in the batch chooses the random stream too
  (`curand_init(philox_seed, bx, philox_offset, &state)` in `sampling.cuh`, `bx` being the block's
  index; `sampling.py` says of seeds that they "do not make sampling invariant to batch position"),
  so a request would get other tokens in other company. No function takes a uniform number instead.
* `top_p_renorm_probs`: not used. Its border comes from truncated fp32 sums and an fp32 top-p
  (`calcFloatValue` in `air_top_p.cuh`), and it keeps all tokens as likely as the last
  (`val >= threshold`) where ours keeps the lower ids.
* `top_k_renorm_probs`, `top_k_top_p_sampling_*`, `min_p_sampling_from_probs`: the same two reasons.
* `top_k_mask_logits`: used. A radix select finds the exact k-th greatest logit of every row (it
  counts in integers, so in any company), and keeps all equal to it (`logits_vec[j] >= pivot` in
  `topk.cuh`). The smallest logit left is the threshold, at which ties are cut as everywhere else:
  the result is meant to be that of `filter_top_k` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from relaykv.kernels.sampling import keep_greatest


def load_filter_top_k() -> Callable[[Tensor, Tensor, int], Tensor]:
    """The function `sampling.filter_top_k`. Compiles FlashInfer's module where none is cached.

    Raises:
        ModuleNotFoundError: FlashInfer is not installed.
    """
    from flashinfer.sampling import get_sampling_module, top_k_mask_logits

    get_sampling_module()  # now, or the first request with a top-k would wait for a compiler

    def filter_top_k_flashinfer(logits: Tensor, top_k: Tensor, _max_top_k: int) -> Tensor:
        """See `sampling.filter_top_k`; logits fp32, fp16 or bf16, at least one row."""
        kept = top_k_mask_logits(logits.contiguous(), top_k)
        threshold = kept.masked_fill(kept == float("-inf"), float("inf")).amin(-1, keepdim=True)
        return keep_greatest(logits, threshold, top_k.clamp(max=logits.shape[-1]).unsqueeze(-1))

    return filter_top_k_flashinfer
