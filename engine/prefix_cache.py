"""Exact prefix hits: chained hashes of full blocks, and a salt that keeps approximate KV apart."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from relaykv.engine.block_pool import Block, BlockPool


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold the start of a prompt, in order."""

    blocks: tuple[Block, ...]
    hashes: tuple[bytes, ...]  # one per block
    num_exact_blocks: int  # the blocks behind these hold approximate KV of the same session


def root_hash(fingerprint: str, tenant: str) -> bytes:
    """The parent of every first block: the model, its numeric type and the tenant."""
    return hashlib.sha256(f"{fingerprint}\0{tenant}".encode()).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """Names a block by all tokens up to its end. `salt` is empty for exact KV."""
    ids = array("I", token_ids).tobytes()
    return hashlib.sha256(parent + len(salt).to_bytes(4, "little") + salt + ids).digest()


def approximation_salt(tenant: str, session: str, policy: str) -> bytes:
    """Names the one reader that may hit approximate KV: same session, same policy."""
    return hashlib.sha256(f"approximate\0{tenant}\0{session}\0{policy}".encode()).digest()


class PrefixCache:
    """Finds blocks by content. Names are chained SHA-256, so a hit needs no token comparison."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str) -> None:
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._by_hash: dict[bytes, Block] = {}
        pool.call_on_evict(self._forget)

    def root(self, tenant: str) -> bytes:
        return root_hash(self._fingerprint, tenant)

    def match(
        self, token_ids: Sequence[int], tenant: str, approximation: bytes | None = None
    ) -> PrefixMatch:
        """Finds the longest cached prefix that leaves at least one token to compute.

        With `approximation`, blocks under that salt may follow exact ones; exact blocks never
        follow approximate ones, because everything behind approximate KV is approximate.
        """
        num_blocks = (len(token_ids) - 1) // self._block_size
        parents = [self.root(tenant)]  # parents[i] is the exact hash of the first i blocks
        blocks: list[Block] = []
        for index in range(num_blocks):
            name = block_hash(parents[-1], self._ids(token_ids, index))
            block = self._by_hash.get(name)
            if block is None:
                break
            parents.append(name)
            blocks.append(block)
        best = PrefixMatch(tuple(blocks), tuple(parents[1:]), len(blocks))
        if approximation is None:
            return best
        for num_exact in range(len(blocks), -1, -1):
            tail = self._approximate_tail(
                token_ids, num_exact, num_blocks, parents[num_exact], approximation
            )
            if num_exact + len(tail) > len(best.blocks):
                tail_blocks = tuple(block for _, block in tail)
                tail_hashes = tuple(name for name, _ in tail)
                best = PrefixMatch(
                    tuple(blocks[:num_exact]) + tail_blocks,
                    tuple(parents[1 : num_exact + 1]) + tail_hashes,
                    num_exact,
                )
        return best

    def register(self, block: Block, name: bytes) -> None:
        """Names a block whose KV is complete. The first block of a name keeps it."""
        if name not in self._by_hash:
            self._by_hash[name] = block
            block.hash = name

    def _approximate_tail(
        self, token_ids: Sequence[int], start: int, stop: int, parent: bytes, salt: bytes
    ) -> list[tuple[bytes, Block]]:
        tail: list[tuple[bytes, Block]] = []
        for index in range(start, stop):
            parent = block_hash(parent, self._ids(token_ids, index), salt)
            block = self._by_hash.get(parent)
            if block is None:
                break
            tail.append((parent, block))
        return tail

    def _ids(self, token_ids: Sequence[int], index: int) -> Sequence[int]:
        return token_ids[index * self._block_size : (index + 1) * self._block_size]

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            self._by_hash.pop(block.hash, None)
