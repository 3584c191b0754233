"""Fixed-size KV blocks: handed out, shared, recorded and taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; the caller should have looked first."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of the KV cache. Only the pool changes it.

    A block is *used* while a running request holds it, *recorded* while only recordings hold
    it, *cached* when nobody does but its content can still be hit, and *free* otherwise.
    """

    id: int
    num_requests: int = 0  # running requests that hold it
    num_recordings: int = 0  # finished requests of a session that hold it
    hash: bytes | None = None  # names its content for exact prefix hits; None: unnamed

    @property
    def is_idle(self) -> bool:
        return self.num_requests == 0 and self.num_recordings == 0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How the pool's blocks are spread; the four add up to the total."""

    free: int
    cached: int
    recorded: int
    used: int


class BlockPool:
    """Owns every block. Idle blocks are reused least recently used first, unnamed ones before."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._idle: OrderedDict[int, Block] = OrderedDict((b.id, b) for b in self._blocks)
        self._on_evict: Callable[[Block], None] | None = None

    def call_on_evict(self, on_evict: Callable[[Block], None]) -> None:
        """Asks to be told, before its `hash` is cleared, when a named block is reused."""
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._idle)

    def allocate(self, num_blocks: int) -> list[Block]:
        """Takes idle blocks for one running request.

        Raises:
            OutOfBlocksError: fewer than `num_blocks` are idle; nothing was taken.
        """
        if num_blocks > len(self._idle):
            raise OutOfBlocksError(f"{num_blocks} blocks wanted, {len(self._idle)} idle")
        taken = []
        for _ in range(num_blocks):
            _, block = self._idle.popitem(last=False)
            if block.hash is not None:
                if self._on_evict is not None:
                    self._on_evict(block)
                block.hash = None
            block.num_requests = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[Block]) -> None:
        """Adds a running request to the holders of blocks."""
        for block in blocks:
            self._idle.pop(block.id, None)
            block.num_requests += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Takes a running request off the holders.

        Pass a request's blocks in sequence order: the tail is reused first, so that what is
        left of a cached prefix is always reachable from its start.
        """
        for block in reversed(list(blocks)):
            assert block.num_requests > 0, f"block {block.id} released more often than held"
            block.num_requests -= 1
            self._idle_if_unheld(block)

    def record(self, blocks: Iterable[Block]) -> None:
        """Adds a recording to the holders of blocks."""
        for block in blocks:
            self._idle.pop(block.id, None)
            block.num_recordings += 1

    def unrecord(self, blocks: Iterable[Block]) -> None:
        """Takes a recording off the holders; like `release`, tail first."""
        for block in reversed(list(blocks)):
            assert block.num_recordings > 0, f"block {block.id} unrecorded more often than recorded"
            block.num_recordings -= 1
            self._idle_if_unheld(block)

    def counts(self) -> BlockCounts:
        """Counts every block by what it is; linear in the number of blocks."""
        used = sum(block.num_requests > 0 for block in self._blocks)
        cached = sum(block.hash is not None for block in self._idle.values())
        idle = len(self._idle)
        return BlockCounts(
            free=idle - cached,
            cached=cached,
            recorded=len(self._blocks) - used - idle,
            used=used,
        )

    def _idle_if_unheld(self, block: Block) -> None:
        if block.is_idle:
            self._idle[block.id] = block
            if block.hash is None:
                self._idle.move_to_end(block.id, last=False)
