"""The block pool of a vLLM engine: hash chain, prefix hits, LRU eviction.

The rules are those of vLLM's V1 block pool for one full-attention group: only full blocks are hashed;
a hit is the leading run of cached blocks, short of the last prompt token; blocks enter the cache when
they are allocated to computed tokens; equal blocks are not merged; a finished request's blocks return
tail first, those without a hash to the front of the free queue, the others to its end.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from ctxgate.inference.kv_events import DEVICE, Cleared, Removed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.inference.kv_events import Event

NULL_BLOCK: Final = 0  # a placeholder that is never handed out, as in the engine


def block_key(parent: bytes, tokens: Sequence[int], salt: str | None = None) -> bytes:
    """The key of a block: its parent's key (empty for the first) and its tokens.

    A salt belongs to the first block alone; the chain carries it on.
    """
    digest = blake2b(array("I", tokens), digest_size=16, key=parent)
    if salt is not None:
        digest.update(b"\0salt\0" + salt.encode())
    return digest.digest()


def extend_chain(keys: list[bytes], tokens: Sequence[int], block_size: int, salt: str | None = None) -> None:
    """Append the keys of all full blocks of `tokens` that `keys` does not cover yet."""
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        keys.append(block_key(keys[-1], block) if keys else block_key(b"", block, salt))


def event_hash(key: bytes) -> int:
    """A block's key as cache events name it."""
    return int.from_bytes(key[-8:], "big")


class BlockPool:
    """A fixed number of blocks, each free, in use, or free but still holding a cached prefix.

    `evicted` counts the cached blocks that were given to another owner. `events` collects what left the
    cache, where somebody wants to know: None, where nobody does.
    """

    __slots__ = ("_cached", "_free", "_keys", "_references", "events", "evicted", "size")

    def __init__(self, size: int) -> None:
        """Make a pool of `size` blocks, one of which is the null block. Raises ValueError below 2."""
        if size < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.size = size
        self.evicted = 0
        self.events: list[Event] | None = None
        self._references = [0] * size
        self._keys: list[bytes | None] = [None] * size
        # The oldest of several equal blocks serves a hit.
        self._cached: dict[bytes, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, size))

    @property
    def free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1; the null block does not count."""
        return 1.0 - len(self._free) / (self.size - 1)

    def is_free(self, block: int) -> bool:
        """Whether no request holds the block."""
        return self._references[block] == 0

    def longest_hit(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the leading run of cached keys, at most `limit` of them. Takes none of them."""
        blocks: list[int] = []
        for key in keys[:limit]:
            holders = self._cached.get(key)
            if holders is None:
                break
            blocks.append(holders[0])
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one reference to each cached block, so that it cannot be evicted."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free queue, evicting what they cached.

        Raises ValueError when fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"cannot allocate {count} of {len(self._free)} free blocks")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Enter a full block into the cache under its key."""
        if self._keys[block] is None:
            self._keys[block] = key
            self._cached.setdefault(key, []).append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; the order is the order of reuse."""
        unhashed: list[int] = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                unhashed.append(block)
            else:
                self._free[block] = None
        for block in reversed(unhashed):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while a block is in use."""
        if len(self._free) != self.size - 1:
            return False
        self._cached.clear()
        self._keys = [None] * self.size
        if self.events is not None:
            self.events.append(Cleared())
        return True

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        holders = self._cached[key]
        holders.remove(block)
        if not holders:
            del self._cached[key]
        self.evicted += 1
        if self.events is not None:
            self.events.append(Removed((event_hash(key),), DEVICE))
