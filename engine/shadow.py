"""Which relayed requests are computed again in full when the engine is idle, and what came of it.

The numbers are per policy. A policy whose answers drift too far is given up for a safer one, for
requests that name none themselves; while the server runs, it does not come back.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from relaykv.engine.client import ShadowSummary

NUM_POSITIONS = 16  # of an answer, whose distributions are compared
_NUM_JOBS = 8  # that wait; the oldest gives way
_NUM_POLICIES = 32  # that are told of; names with shares are made up by clients
_WINDOW = 20  # runs of a policy that its drift is judged by
# What is tried next instead of a policy; of any other, the policy that is named last.
_SAFER = {"shift": "epic", "kvcomm": "auto", "epic": "auto", "learned": "auto", "auto": "auto@0.25"}
_SAFEST = "full"


@dataclass(frozen=True, slots=True)
class ShadowJob:
    """A relayed request that has ended, with the start of its answer."""

    request_id: str
    policy: str
    tenant: str
    session: str
    agent_class: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # at most NUM_POSITIONS


class ShadowSampler:
    """Chooses every so many-th relayed request. Two servers choose alike."""

    def __init__(self, rate: float) -> None:
        """
        Args:
            rate: share of requests, from 0 to 1.

        Raises:
            ValueError: it is none.
        """
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"the shadow rate is a share from 0 to 1, not {rate:g}")
        self._rate = rate
        self._sum = 0.0

    def take(self) -> bool:
        """Whether the next request is chosen."""
        self._sum += self._rate
        # Sums of tenths and the like fall a little short.
        if self._sum < 1.0 - 1e-9:
            return False
        self._sum -= 1.0
        return True


@dataclass(slots=True)
class _Drift:
    """Of one policy."""

    num_runs: int = 0
    total_kl: float = 0.0
    max_kl: float = 0.0
    total_agreement: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def add(self, kl: float, agreement: float) -> None:
        self.num_runs += 1
        self.total_kl += kl
        self.max_kl = max(self.max_kl, kl)
        self.total_agreement += agreement
        self.recent.append(kl)


class ShadowBook:
    """Waiting jobs, drift by policy, and the policy that requests get which name none."""

    def __init__(self, default_policy: str, bound: float) -> None:
        """
        Args:
            bound: mean divergence in nats above which a policy is given up.

        Raises:
            ValueError: the bound is not above 0.
        """
        if not bound > 0.0:
            raise ValueError(f"the shadow bound is a divergence above 0, not {bound:g}")
        self.default_policy = default_policy
        self.num_dropped = 0
        self._bound = bound
        self._jobs: deque[ShadowJob] = deque()
        self._drifts: dict[str, _Drift] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    def add(self, job: ShadowJob) -> ShadowJob | None:
        """Queues a job; returns the one that gives way to it."""
        self._jobs.append(job)
        if len(self._jobs) <= _NUM_JOBS:
            return None
        self.num_dropped += 1
        return self._jobs.popleft()

    def put_back(self, job: ShadowJob) -> None:
        """Makes an interrupted job the next one."""
        self._jobs.appendleft(job)

    def next(self) -> ShadowJob | None:
        return self._jobs.popleft() if self._jobs else None

    def note(self, policy: str, kl: float, agreement: float) -> str | None:
        """Takes in how far a policy's answer was from the full one.

        Args:
            kl: mean divergence over the compared positions, nats.
            agreement: share of them with the same likeliest token.

        Returns:
            What to say when the default policy is given up for a safer one.
        """
        drift = self._drifts.pop(policy, _Drift())
        drift.add(kl, agreement)
        self._drifts[policy] = drift
        if len(self._drifts) > _NUM_POLICIES:
            del self._drifts[next(iter(self._drifts))]  # the one that was met longest ago
        mean = statistics.fmean(drift.recent)
        is_judged = len(drift.recent) == _WINDOW and policy == self.default_policy
        if not is_judged or mean <= self._bound:
            return None
        self.default_policy = _SAFER.get(policy, _SAFEST)
        return (
            f"answers under the policy '{policy}' were {mean:.3f} nats from full ones in the last "
            f"{_WINDOW} shadow runs, more than {self._bound:g}: sessions get "
            f"'{self.default_policy}' from now on"
        )

    def summaries(self) -> tuple[ShadowSummary, ...]:
        return tuple(
            ShadowSummary(
                policy,
                drift.num_runs,
                drift.total_kl / drift.num_runs,
                drift.max_kl,
                drift.total_agreement / drift.num_runs,
            )
            for policy, drift in self._drifts.items()
        )
