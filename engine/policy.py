"""Recompute policies as data: which rows of a relayed prompt are computed again, and where.

A prompt's rows are N (must be computed) and R (relayed). N is active at every layer. Below
`inject` only N is; in [inject, select) all of R is too; at `select` the rows S of R are chosen
that stay active up to and including `stop`; above it only N remains.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relaykv.engine.policy_name import parse_policy_name

_AUTO_SHARE = 0.125  # of relayed layer-tokens, where a name holds no other


class Placement(enum.Enum):
    """What is put in the place of a segment before any of it is computed again."""

    SHIFT = "shift"  # its recorded KV, keys turned to their new position
    LEARNED = "learned"  # and what hand-offs of the kind have lacked on average (handoff_slots.py)
    ANCHORS = "anchors"  # and what texts like it have lacked in its place (anchor_pools.py)


class Deviation(enum.Enum):
    """How far a fresh value vector lies from the relayed one, per token."""

    NONE = "none"
    COSINE = "cosine"  # 1 - cosine, mean over KV heads (RelayCaching, Eq. 1)
    SQUARED = "squared"  # sum of squared differences (CacheBlend, section 4.2)


@dataclass(frozen=True, slots=True)
class Bands:
    """Layer bounds of a policy; `select` and `stop` are inside the model, `stop` inclusive."""

    inject: int
    select: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.inject <= self.select <= self.stop:
            raise ValueError(f"bands must rise: inject {self.inject}, {self.select}, {self.stop}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens of a segment are computed again: the union of everything that is set."""

    num_first: int = 0  # EPIC: the tokens that start a segment
    first_share: float = 0.0  # these as a share of the segment
    num_last: int = 0  # RelayCaching: the suffix
    deviation: Deviation = Deviation.NONE
    deviation_share: float | None = None  # the top share of the segment by deviation
    deviation_factor: float | None = None  # at least this many times the segment's mean
    deviation_floor: float = 0.0  # and at least this much, so that noise selects nothing
    influence_factor: float | None = None  # attention received, times the segment's mean
    keep_fresh: bool = False  # fresh KV of the rows not selected replaces theirs at `select`
    expected_share: float = 0.0  # of a segment's tokens; the scheduler's guess of the cost


@dataclass(frozen=True, slots=True)
class Policy:
    """One method of reuse. `bands` None: relayed KV is never computed again."""

    name: str
    relays: bool
    bands: Bands | None = None
    selection: Selection = Selection()
    placement: Placement = Placement.SHIFT
    # What serves a segment when `placement` can be had for it, None: this policy, and when it
    # cannot, None: it is computed.
    warm: Policy | None = None
    cold: Policy | None = None
    exact_choices: bool = False  # answers to one question that stand side by side are computed
    observes: bool = False  # all segments are computed, for what can be learned from them

    def relay_cost(self, num_layers: int) -> float:
        """Expected layer-tokens computed per relayed token, as a share of a full prefill."""
        if not self.relays:
            return 1.0
        if self.bands is None:
            return 0.0
        full = self.bands.select - self.bands.inject
        sparse = self.bands.stop - self.bands.select + 1
        return (full + self.selection.expected_share * sparse) / num_layers

    def with_share(self, name: str, share: float, num_layers: int) -> Policy:
        """The same policy, made to compute a share of the relayed layer-tokens.

        What its layers up to the selection take is the least that it computes.
        """
        if self.bands is None:
            return self
        full = self.bands.select - self.bands.inject
        sparse = self.bands.stop - self.bands.select + 1
        selected = min(max((share * num_layers - full) / sparse, 0.0), 1.0)
        selection = replace(self.selection, expected_share=selected)
        if selection.deviation_share is not None:
            selection = replace(selection, deviation_share=selected)
        else:
            selection = replace(selection, num_first=0, first_share=selected)
        warm, cold = (
            part and part.with_share(part.name, share, num_layers)
            for part in (self.warm, self.cold)
        )
        return replace(self, name=name, selection=selection, warm=warm, cold=cold)


def builtin_policies(num_layers: int, relay_bands: Bands) -> Mapping[str, Policy]:
    """Every policy by name, for a model with `num_layers` layers.

    Args:
        relay_bands: where RelayCaching repairs this model; from its profile.
    """
    last = num_layers - 1
    # EPIC (arXiv 2410.15332), LegoLink with k = 16.
    first_16 = (Bands(0, 0, last), Selection(num_first=16, expected_share=0.06))
    epic = Policy("epic", True, *first_16)
    learned = Policy("learned", True, *first_16, Placement.LEARNED)
    policies = (
        Policy("full", relays=False),
        Policy("shift", relays=True),
        epic,
        # CacheBlend (arXiv 2405.16444): check layer 1, 15 % by squared value difference.
        Policy(
            "cacheblend",
            True,
            Bands(0, min(1, last), last),
            Selection(
                deviation=Deviation.SQUARED,
                deviation_share=0.15,
                keep_fresh=True,
                expected_share=0.15,
            ),
        ),
        # RelayCaching (arXiv 2603.13289), Eqs. 5-9 with the paper's thresholds. The floor is
        # ours: relative thresholds alone would select a fixed share of pure rounding noise.
        Policy(
            "relay",
            True,
            relay_bands,
            Selection(
                num_last=10,
                deviation=Deviation.COSINE,
                deviation_factor=1.5,
                deviation_floor=1e-3,
                influence_factor=1.45,
                expected_share=0.2,
            ),
        ),
        # KVCOMM (arXiv 2510.12872), with a gate for each segment and not one for all of a prompt.
        Policy("kvcomm", True, placement=Placement.ANCHORS),
        learned,
        Policy(
            "auto",
            True,
            *first_16,
            Placement.LEARNED,
            warm=learned,
            cold=epic,
            exact_choices=True,
        ).with_share("auto", _AUTO_SHARE, num_layers),
        # Exact. What it learns, `learned` and `auto` use.
        Policy("observe", True, placement=Placement.LEARNED, observes=True),
    )
    return {policy.name: policy for policy in policies}


def find_policy(policies: Mapping[str, Policy], name: str, num_layers: int) -> Policy:
    """A policy by its name, which may hold a share.

    Raises:
        ValueError: as `parse_policy_name`.
    """
    if name in policies:
        return policies[name]
    parsed = parse_policy_name(name, policies)
    policy = policies[parsed.base]
    return policy if parsed.share is None else policy.with_share(name, parsed.share, num_layers)
