"""Names of policies: one of the known ones, or one with a share, such as `auto@0.25`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Policies that can be told how much to compute again. The others' cost follows from the data.
TAKING_SHARES = ("epic", "cacheblend", "learned", "auto")


@dataclass(frozen=True, slots=True)
class PolicyName:
    """A policy, and the share of relayed layer-tokens that it is to compute again."""

    base: str
    share: float | None = None  # above 0, at most 1; None: the policy's own


def parse_policy_name(text: str, known: Iterable[str]) -> PolicyName:
    """Takes a name apart.

    Args:
        known: names without shares.

    Raises:
        ValueError: the policy is unknown or takes no share, or the share is none. The message is
            for whoever wrote the name.
    """
    base, at, share_text = text.partition("@")
    names = tuple(known)
    if base not in names:
        raise ValueError(f"unknown policy '{base}'; known: {', '.join(names)}")
    if not at:
        return PolicyName(base)
    if base not in TAKING_SHARES:
        takers = ", ".join(name for name in TAKING_SHARES if name in names)
        raise ValueError(f"policy '{base}' takes no share (these do: {takers})")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ValueError(
            f"'{share_text}' is no share of layer-tokens for '{base}': a number above 0, at most 1"
        )
    return PolicyName(base, share)
