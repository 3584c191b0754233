"""Changing next-token logits, drawing from them, and their log-probabilities.

Every function works on rows independently: a row's result is the same bit for bit whatever
rows stand beside it. Sums that decide anything are taken over integers for that reason, since
the order in which a device adds floats depends on the shape and may differ from run to run.
Filters mark dropped tokens with -inf. n is the number of rows and V the vocabulary.

What depends on the values of a row is decided on the device: bounds that give tensors their shapes
come from the caller, so that nothing waits for the device. `filter_top_p_probing` is the exception,
for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Probabilities become integers in units of 2**-40, so that a sum over any vocabulary is exact
# in int64 and in float64.
_UNITS = float(2**40)
# Top-p looks at this many of the likeliest tokens before it sorts a whole vocabulary, which on
# a CPU costs as much as a small model's decode step.
_PROBE_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters that have a version per device, all with the same results.

    Attributes:
        top_k: `filter_top_k`.
        top_p: `filter_top_p`.
    """

    top_k: Callable[[Tensor, Tensor, int], Tensor]
    top_p: Callable[[Tensor, Tensor, int], Tensor]


def cpu_filters() -> Filters:
    """Those that are fast where reading a value costs nothing."""
    return Filters(filter_top_k, filter_top_p_probing)


def cuda_filters() -> Filters:
    """Those that never wait for the device.

    Raises:
        ModuleNotFoundError: FlashInfer is not installed.
    """
    from relaykv.kernels.sampling_flashinfer import load_filter_top_k

    return Filters(load_filter_top_k(), filter_top_p)


def apply_penalties(
    logits: Tensor, prompt_counts: Tensor, output_counts: Tensor, penalties: Tensor
) -> Tensor:
    """Penalises tokens that have occurred.

    Args:
        logits: [n, V] fp32.
        prompt_counts: [n, V], how often each token occurs in the prompt.
        output_counts: [n, V], how often among the generated tokens.
        penalties: [n, 3] fp32: repetition (divides positive logits and multiplies negative
            ones, over prompt and output), frequency (subtracted per occurrence in the output),
            presence (subtracted once for a token in the output).

    Returns:
        New logits [n, V].
    """
    repetition, frequency, presence = penalties.unsqueeze(-1).unbind(dim=1)  # [n, 1] each
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    seen = (prompt_counts > 0) | (output_counts > 0)
    result = torch.where(seen, repeated, logits)
    return result - frequency * output_counts - presence * (output_counts > 0)


def apply_logit_bias(logits: Tensor, places: Tensor, bias: Tensor) -> Tensor:
    """Adds bias [k] to the logits [n, V] at places [k] (int64): row * V + token id."""
    return logits.flatten().index_add(0, places, bias).view(logits.shape)


def apply_token_mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """Keeps the logits [n, V] of tokens that are allowed [n, V] (bool); returns new logits."""
    return logits.masked_fill(~allowed, float("-inf"))


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """The bits of packed [n, >= num_bits / 8] (uint8), lowest first, as bool [n, num_bits]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(1)  # [n, bytes, 8]
    return bits.flatten(start_dim=1)[:, :num_bits].bool()


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divides logits [n, V] by temperature [n] (> 0), the greatest logit of a row set to 0.

    Setting it to 0 first keeps a temperature close to 0 from overflowing at the top.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / temperature.clamp(min=torch.finfo(logits.dtype).tiny).unsqueeze(-1)


def filter_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keeps the top_k [n] (int64, >= 1) greatest of logits [n, V]; of equal ones, lower ids.

    Args:
        max_top_k: a bound on the values of `top_k`.
    """
    vocab_size = logits.shape[-1]
    values = logits.topk(min(max_top_k, vocab_size), dim=-1).values
    num_kept = top_k.clamp(max=vocab_size).unsqueeze(-1)
    return keep_greatest(logits, values.gather(-1, num_kept - 1), num_kept)


def filter_top_p(logits: Tensor, top_p: Tensor, max_candidates: int) -> Tensor:
    """Keeps the fewest likeliest tokens whose probabilities reach top_p [n] (fp64, 0 to 1).

    At least one of logits [n, V] stays. Of equally likely tokens, lower ids stay.

    Args:
        max_candidates: a bound on the number of logits above -inf in any row.
    """
    units, limit = _nucleus(logits, top_p)
    values, token_ids = _greatest(logits, max_candidates)
    return _keep_nucleus(logits, values, units.gather(-1, token_ids), limit)


def filter_top_p_probing(logits: Tensor, top_p: Tensor, max_candidates: int) -> Tensor:
    """`filter_top_p`, sorting a whole vocabulary only if the likeliest tokens are too few."""
    units, limit = _nucleus(logits, top_p)
    values, token_ids = _greatest(logits, min(_PROBE_WIDTH, max_candidates))
    likeliest = units.gather(-1, token_ids)
    if bool((likeliest.sum(dim=-1, keepdim=True) < limit).any()):
        values, token_ids = _greatest(logits, max_candidates)
        likeliest = units.gather(-1, token_ids)
    return _keep_nucleus(logits, values, likeliest, limit)


def filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keeps of logits [n, V] tokens at least min_p [n] (0 to 1) times as likely as the best."""
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    return logits.masked_fill(logits < floor, float("-inf"))


def keep_greatest(logits: Tensor, threshold: Tensor, num_kept: Tensor) -> Tensor:
    """Keeps the num_kept [n, 1] greatest of logits [n, V]; of equal ones, lower ids.

    Args:
        threshold: [n, 1], the smallest logit that is kept.
    """
    above = logits > threshold
    tied = logits == threshold
    num_ties_kept = num_kept - above.sum(dim=-1, keepdim=True)
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_ties_kept))
    return logits.masked_fill(~kept, float("-inf"))


def sample_from_probs(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution in order of ids.

    Args:
        probs: [n, V] fp32, non-negative; need not add up to 1 exactly.
        uniform: [n] fp64 in [0, 1).

    Returns:
        Token ids [n] int64. A token of probability 0 (less than 2**-40) is never drawn. Where
        probabilities are NaN the id means nothing, but is one of the vocabulary.
    """
    cumulative = _to_units(probs).cumsum(dim=-1)  # [n, V]
    total = cumulative[:, -1]
    target = torch.minimum((uniform * total).to(torch.int64), total - 1)
    drawn = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return drawn.clamp(max=probs.shape[-1] - 1)


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token per row, and the likeliest tokens of the row.

    Args:
        logits: [n, V] fp32.
        token_ids: [n] int64.
        num_top: k, at most V.

    Returns:
        Log-probabilities [n] of `token_ids`; then ids [n, k] (int64) of the likeliest tokens and
        their log-probabilities [n, k], likeliest first, of equal ones lower ids first.
    """
    logprobs = logits.log_softmax(dim=-1)
    # One integer orders by value, then by id: log-probabilities are at most 0, and magnitudes
    # compare like their bits. In place, since on a CPU new memory costs more than the arithmetic.
    keys = logprobs.abs().view(torch.int32).long().mul_(2**32)
    keys.add_(torch.arange(logits.shape[-1], device=logits.device))
    likeliest = keys.topk(num_top, dim=-1, largest=False).values & 0xFFFFFFFF
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen, likeliest, logprobs.gather(-1, likeliest)


def _greatest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The greatest logits of rows [n, V], descending, and their ids, [n, min(num, V)] each."""
    if num < logits.shape[-1]:
        values, token_ids = logits.topk(num, dim=-1)
    else:
        values, token_ids = logits.sort(dim=-1, descending=True)
    return values, token_ids


def _nucleus(logits: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in units [n, V], and how many [n, 1] (fp64) a nucleus has to reach."""
    units = _to_units(logits.softmax(dim=-1))
    return units, top_p.unsqueeze(-1) * units.sum(dim=-1, keepdim=True)


def _keep_nucleus(logits: Tensor, values: Tensor, likeliest: Tensor, limit: Tensor) -> Tensor:
    """Keeps the nucleus of logits [n, V].

    Args:
        values: [n, m], its greatest, descending, enough to reach the limit.
        likeliest: [n, m], their probabilities in units.
        limit: [n, 1].
    """
    # A token stays when the likelier ones have not reached the limit.
    missing = likeliest.cumsum(dim=-1) - likeliest < limit
    num_kept = missing.sum(dim=-1, keepdim=True).clamp(min=1)
    return keep_greatest(logits, values.gather(-1, num_kept - 1), num_kept)


def _to_units(probs: Tensor) -> Tensor:
    return (probs * _UNITS).to(torch.int64)
