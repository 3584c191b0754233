"""Which hand-offs recur, how often each was observed, and whether their mean offset may be used.

A hand-off is one agent's text in another's prompt, behind certain words. The KV that the reader
computes for it differs from the relayed KV by an offset much of which is the same every time
(KVCOMM, arXiv 2510.12872; one offset for all tokens of a segment does as well as one per token).
This table knows the kinds of hand-offs; the offsets themselves are on the device
(`offset_memory.py`).

A kind is looked up under three keys, from the most to the least particular. The two general ones
serve kinds that were never seen, so only such kinds test them: observations of a kind that they
had learned from already say nothing about how they do with another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.batch import HoldoutError, Lesson

NUM_LEVELS = 3
MIN_OBSERVATIONS = 4
MAX_KEY_ERROR = 0.9
MAX_VALUE_ERROR = 1.0
# Every so many hand-offs one is due to be computed and observed, whatever the gate says. The first
# never is: what happens once needs no mean.
_PERIOD = 4  # of a kind with fewer than the least observations
_MATURE_PERIOD = 50
# Later errors count at least this much, so that a mean that goes stale is found out.
_LEAST_WEIGHT = 0.2
_LEVEL_NAMES = (
    "of hand-offs of this kind",
    "of hand-offs to this kind of reader behind the same words",
    "of hand-offs to this kind of reader",
)


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """A kind of hand-off; the empty parts of the more general keys match everything."""

    tenant: str
    receiver: str  # class of the agent that reads
    glue: tuple[int, ...] | None  # tokens just before the segment
    producer: str | None  # class of the agent whose recording it is

    def levels(self) -> tuple[HandoffKey, ...]:
        """This key, then without the producer, then without the glue."""
        return (
            self,
            HandoffKey(self.tenant, self.receiver, self.glue, None),
            HandoffKey(self.tenant, self.receiver, None, None),
        )


@dataclass(slots=True, eq=False)
class HandoffSlot:
    """One key's state. Only the table changes it."""

    offset_index: int  # of its mean, in the device's memory
    num_handoffs: int = 0
    num_observations: int = 0
    num_trials: int = 0  # observations that say how it does with what it is there for
    num_errors: int = 0  # of these, the ones that came when there was a mean to be tested
    key_error: float = 0.0  # mean, later ones weighing more
    value_error: float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next hand-off is to be observed."""
        is_mature = self.num_observations >= MIN_OBSERVATIONS
        return (self.num_handoffs + 1) % (_MATURE_PERIOD if is_mature else _PERIOD) == 0

    @property
    def is_usable(self) -> bool:
        return (
            self.num_trials >= MIN_OBSERVATIONS
            and self.num_errors > 0
            and self.key_error < MAX_KEY_ERROR
            and self.value_error < MAX_VALUE_ERROR
        )

    def add_error(self, error: HoldoutError) -> None:
        self.num_errors += 1
        weight = max(1 / self.num_errors, _LEAST_WEIGHT)
        self.key_error += weight * (error.keys - self.key_error)
        self.value_error += weight * (error.values - self.value_error)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the table says of a hand-off that is about to happen."""

    offset_index: int | None  # of the mean to correct it by; None: there is none fit for it
    is_due: bool  # it is time to compute and observe it
    why: str


@dataclass(frozen=True, slots=True)
class Trial:
    """An observation that was launched: whom its errors concern."""

    slots: tuple[HandoffSlot, ...]
    counts: tuple[bool, ...]  # whether the slot is tested by it
    lessons: tuple[Lesson, ...]


class HandoffSlots:
    """The kinds of hand-offs, at most `capacity`; the least recently met gives way."""

    def __init__(self, capacity: int) -> None:
        """
        Raises:
            ValueError: not even one hand-off's keys fit.
        """
        if capacity < NUM_LEVELS:
            raise ValueError(f"{capacity} slots are too few: every hand-off has {NUM_LEVELS} keys")
        self._slots: OrderedDict[HandoffKey, HandoffSlot] = OrderedDict()
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, key: HandoffKey) -> HandoffSlot | None:
        """The state of exactly this key."""
        return self._slots.get(key)

    def judge(self, key: HandoffKey) -> Verdict:
        """Finds the most particular mean that may correct a hand-off. Changes nothing."""
        slots = [self._slots.get(level) for level in key.levels()]
        is_due = slots[0] is not None and slots[0].is_due
        for slot, name in zip(slots, _LEVEL_NAMES, strict=True):
            if slot is not None and slot.is_usable:
                why = (
                    f"corrected by the mean of {slot.num_observations} observations {name}, which "
                    f"left {slot.key_error:.2f} of the squared error of keys and "
                    f"{slot.value_error:.2f} of that of values in those it had not seen"
                )
                return Verdict(slot.offset_index, is_due, why)
        return Verdict(None, is_due, _why_not(slots[0]))

    def count(self, key: HandoffKey) -> None:
        """Takes in that a hand-off happens."""
        for level in key.levels():
            self._slot(level).num_handoffs += 1

    def observe(self, key: HandoffKey) -> Trial:
        """Takes in that an observation is launched, in the order of launching."""
        slots = tuple(self._slot(level) for level in key.levels())
        lessons = tuple(Lesson(s.offset_index, s.num_observations) for s in slots)
        # A general key is tested by kinds that are new to it.
        counts = (True, *(slot.num_observations == 0 for slot in slots[:-1]))
        for slot, is_trial in zip(slots, counts, strict=True):
            slot.num_observations += 1
            slot.num_trials += is_trial
        return Trial(slots, counts, lessons)

    def take(self, trial: Trial, errors: Sequence[HoldoutError]) -> None:
        """Takes in what the means left of an observation, one error per lesson."""
        for slot, is_trial, lesson, error in zip(
            trial.slots, trial.counts, trial.lessons, errors, strict=True
        ):
            if is_trial and lesson.num_observations:
                slot.add_error(error)

    def forget(self, key: HandoffKey) -> None:
        """Drops a kind and what is known under its more general keys."""
        for level in key.levels():
            slot = self._slots.pop(level, None)
            if slot is not None:
                self._free.append(slot.offset_index)

    def _slot(self, key: HandoffKey) -> HandoffSlot:
        slot = self._slots.get(key)
        if slot is None:
            if not self._free:
                _, oldest = self._slots.popitem(last=False)
                self._free.append(oldest.offset_index)
            slot = self._slots[key] = HandoffSlot(self._free.pop())
        self._slots.move_to_end(key)
        return slot


def _why_not(slot: HandoffSlot | None) -> str:
    num_observations = 0 if slot is None else slot.num_observations
    if slot is None or num_observations < MIN_OBSERVATIONS:
        times = "once" if num_observations == 1 else f"{num_observations} times"
        return f"hand-offs of this kind were observed {times}, {MIN_OBSERVATIONS} are needed"
    return (
        f"the mean of {num_observations} observations left {slot.key_error:.2f} of the squared "
        f"error of keys and {slot.value_error:.2f} of that of values in those it had not seen"
    )
