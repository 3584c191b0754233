"""Finished requests whose tokens and blocks are kept so that later prompts can relay them."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from relaykv.engine.block_pool import Block, BlockPool
from relaykv.engine.segment import Segment
from relaykv.engine.segment_index import SegmentIndex

# Prompts that start with the same so many tokens are taken for the same agent's.
_NUM_CLASS_TOKENS = 32


def agent_class(name: str, prompt: Sequence[int]) -> str:
    """The class of an agent: its name, or what the start of its prompt gives."""
    if name:
        return name
    return hashlib.sha256(array("I", prompt[:_NUM_CLASS_TOKENS]).tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session belongs to the tenant that made it: the same name elsewhere is another one."""

    tenant: str
    session: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Tokens of a finished request that have KV, prompt and answer, and the blocks they are in."""

    id: int  # rises with time
    request_id: str
    key: SessionKey
    token_ids: tuple[int, ...]
    blocks: tuple[Block, ...]
    num_prompt_tokens: int
    taint: int  # approximate hand-offs behind its KV; 0 is exact
    agent_class: str  # of the agent whose request it was
    question: str  # that it answers, as a digest; "" is like no other


@dataclass(slots=True)
class _Session:
    index: SegmentIndex
    recordings: dict[int, Recording] = field(default_factory=dict)
    last_used: float = 0.0


class RecordingStore:
    """All recordings of all sessions; the oldest give way when the pool needs blocks."""

    def __init__(
        self,
        pool: BlockPool,
        min_segment_tokens: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._min_segment_tokens = min_segment_tokens
        self._now = now
        self._next_id = 0
        self._recordings: dict[int, Recording] = {}  # oldest or longest unrenewed first
        self._sessions: dict[SessionKey, _Session] = {}

    def __getitem__(self, recording_id: int) -> Recording:
        return self._recordings[recording_id]

    def __len__(self) -> int:
        return len(self._recordings)

    def add(
        self,
        request_id: str,
        key: SessionKey,
        token_ids: tuple[int, ...],
        blocks: Iterable[Block],
        num_prompt_tokens: int,
        taint: int,
        agent_name: str = "",
        question: str = "",
    ) -> None:
        """Records a finished request.

        A repetition of a recorded one only replaces it; one with more taint only renews it.
        The caller still holds the blocks and releases them afterwards.
        """
        if not token_ids:
            return
        session = self._sessions.get(key)
        if session is None:
            index = SegmentIndex(self._min_segment_tokens)
            session = self._sessions[key] = _Session(index)
        session.last_used = self._now()
        same = next((r for r in session.recordings.values() if r.token_ids == token_ids), None)
        if same is not None and same.taint < taint:
            self._recordings[same.id] = self._recordings.pop(same.id)
            return
        recording = Recording(
            self._next_id,
            request_id,
            key,
            token_ids,
            tuple(blocks),
            num_prompt_tokens,
            taint,
            agent_class(agent_name, token_ids[:num_prompt_tokens]),
            question,
        )
        self._next_id += 1
        self._pool.record(recording.blocks)
        if same is not None:
            self._drop(same)
        self._recordings[recording.id] = recording
        self._sessions[key] = session  # dropping its only recording would have removed it
        session.recordings[recording.id] = recording
        session.index.add(recording.id, token_ids, taint)

    def match(
        self, key: SessionKey, token_ids: list[int], start: int, without: str = ""
    ) -> list[Segment]:
        """Segments of a prompt behind `start` that this session has recorded.

        Args:
            without: a request whose recording is not to be found.
        """
        session = self._sessions.get(key)
        if session is None:
            return []
        if not without:  # else nobody is using it: the engine looks into a request of its own
            session.last_used = self._now()
        hidden = [r.id for r in session.recordings.values() if without and r.request_id == without]
        return session.index.match(token_ids, start, len(token_ids), hidden)

    def has_session(self, key: SessionKey) -> bool:
        return key in self._sessions

    def evict_until(self, num_idle: int) -> bool:
        """Drops recordings, oldest first, until the pool has `num_idle` idle blocks.

        A recording whose blocks running requests hold frees nothing now but is dropped all
        the same once its turn comes. Returns whether enough blocks are idle.
        """
        for recording in list(self._recordings.values()):
            if self._pool.num_idle >= num_idle:
                return True
            self._drop(recording)
        return self._pool.num_idle >= num_idle

    def delete_session(self, key: SessionKey) -> bool:
        """Forgets a session; False when there is none."""
        session = self._sessions.get(key)
        if session is None:
            return False
        for recording in list(session.recordings.values()):
            self._drop(recording)
        return True

    def sessions(self, tenant: str) -> Iterator[tuple[SessionKey, list[Recording], float]]:
        """A tenant's sessions with their recordings and the time of their last use."""
        for key, session in self._sessions.items():
            if key.tenant == tenant:
                yield key, list(session.recordings.values()), session.last_used

    def _drop(self, recording: Recording) -> None:
        del self._recordings[recording.id]
        session = self._sessions[recording.key]
        del session.recordings[recording.id]
        session.index.remove(recording.id)
        if not session.recordings:
            del self._sessions[recording.key]
        self._pool.unrecord(recording.blocks)
