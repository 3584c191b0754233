"""Changing next-token logits, and drawing from them.

Every function works on rows independently: a row's result is the same bit for bit whatever
rows stand beside it. Sums that decide anything are taken over integers for that reason, since
the order in which a device adds floats depends on the shape and may differ from run to run.
Filters mark dropped tokens with -inf. n is the number of rows and V the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Probabilities become integers in units of 2**-40, so that a sum over any vocabulary is exact
# in int64 and in float64.
_UNITS = float(2**40)
# Top-p looks at this many of the likeliest tokens before it sorts a whole vocabulary, which on
# a CPU costs as much as a small model's decode step.
_PROBE_WIDTH = 1024


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


def apply_logit_bias(logits: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Adds bias [k] to the logits [V] of token_ids [k] (int64); returns new logits [V]."""
    return logits.index_add(0, token_ids, bias)


def apply_token_mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """Keeps the logits [V] of tokens that are allowed [V] (bool); returns new logits [V]."""
    return logits.masked_fill(~allowed, float("-inf"))


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divides logits [n, V] by temperature [n] (> 0), the greatest logit of a row set to 0.

    Setting it to 0 first keeps a temperature close to 0 from overflowing at the top.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / temperature.clamp(min=torch.finfo(logits.dtype).tiny).unsqueeze(-1)


def filter_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keeps the top_k [n] (int64, >= 1) greatest of logits [n, V]; of equal ones, lower ids."""
    num_kept = top_k.clamp(max=logits.shape[-1])
    values = logits.topk(int(num_kept.max()), dim=-1).values
    return _keep_greatest(logits, values, num_kept)


def filter_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest likeliest tokens whose probabilities reach top_p [n] (fp64, 0 to 1).

    At least one of logits [n, V] stays. Of equally likely tokens, lower ids stay.
    """
    units = _to_units(logits.softmax(dim=-1))  # [n, V]
    limit = top_p.unsqueeze(-1) * units.sum(dim=-1, keepdim=True)  # [n, 1] fp64
    values, token_ids = logits.topk(min(_PROBE_WIDTH, logits.shape[-1]), dim=-1)
    if bool((units.gather(-1, token_ids).sum(dim=-1, keepdim=True) < limit).any()):
        values, token_ids = logits.sort(dim=-1, descending=True)
    likeliest = units.gather(-1, token_ids)
    # A token stays when the likelier ones have not reached the limit.
    num_kept = (likeliest.cumsum(dim=-1) - likeliest < limit).sum(dim=-1).clamp(min=1)
    return _keep_greatest(logits, values, num_kept)


def filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keeps of logits [n, V] tokens at least min_p [n] (0 to 1) times as likely as the best."""
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    return logits.masked_fill(logits < floor, float("-inf"))


def sample_from_probs(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution in order of ids.

    Args:
        probs: [n, V] fp32, non-negative; need not add up to 1 exactly.
        uniform: [n] fp64 in [0, 1).

    Returns:
        Token ids [n] int64. A token of probability 0 (less than 2**-40) is never drawn.
    """
    cumulative = _to_units(probs).cumsum(dim=-1)  # [n, V]
    total = cumulative[:, -1]
    target = torch.minimum((uniform * total).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)


def _to_units(probs: Tensor) -> Tensor:
    return (probs * _UNITS).to(torch.int64)


def _keep_greatest(logits: Tensor, values: Tensor, num_kept: Tensor) -> Tensor:
    """Keeps num_kept [n] of logits [n, V], whose greatest, descending, are values [n, m]."""
    threshold = values.gather(-1, num_kept.unsqueeze(-1) - 1)  # [n, 1]
    above = logits > threshold
    tied = logits == threshold
    num_ties_kept = num_kept - above.sum(dim=-1)
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_ties_kept.unsqueeze(-1)))
    return logits.masked_fill(~kept, float("-inf"))
