"""The block cache of one simulated engine, in whole runs of blocks instead of single ones. Pure.

The rules are those of `inference.twin_cache`: only full blocks are kept, a hit is the leading run of cached
blocks, what a finished request frees goes to the end of the queue of free blocks, tail first, and the front
of the queue is evicted first. But a conversation only ever grows, so what an engine holds of it is one run,
and a run is moved, shortened or evicted at once: the cost of a request does not grow with its prompt.

A prompt is a head, which many conversations may share, and the conversation behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class _Run:
    """Blocks `low` up to `high` of a conversation or a head. One without an owner will never be hit."""

    __slots__ = ("high", "low", "owner", "turn")

    def __init__(self, owner: _Head | str | None, turn: int, low: int, high: int) -> None:
        self.owner = owner
        self.turn = turn
        self.low = low
        self.high = high


class _Head:
    """What is cached of a head: its first `extent` blocks, used by so many sequences, else free as a run."""

    __slots__ = ("extent", "run", "users")

    def __init__(self) -> None:
        self.extent = 0
        self.users = 0
        self.run: _Run | None = None


class Prompt:
    """What the cache knows of a sequence: its chain, and how many of its blocks are held.

    `head` is the name of the shared head (None: none) and `head_blocks` its full blocks; `common` tells
    how many tokens the prompt shares with the conversation's prompt at an earlier turn.
    """

    __slots__ = ("common", "conversation", "head", "head_blocks", "held", "turn")

    def __init__(
        self,
        conversation: str,
        turn: int,
        head: str | None,
        head_blocks: int,
        common: Callable[[int], int],
    ) -> None:
        self.conversation = conversation
        self.turn = turn
        self.head = head
        self.head_blocks = head_blocks
        self.common = common
        self.held = 0  # blocks, those of the head included


class RunCache:
    """Free and cached blocks of one engine."""

    __slots__ = ("_empty", "_heads", "_queue", "_runs", "block", "evicted", "free", "size")

    def __init__(self, size: int, block: int) -> None:
        """Make a cache of `size` blocks of `block` tokens; one of them is the engine's null block."""
        self.size = size
        self.block = block
        self.evicted = 0
        self.free = size - 1
        self._empty = size - 1  # free blocks that hold nothing; they are at the front of the queue
        self._queue: OrderedDict[int, _Run] = OrderedDict()
        self._runs: dict[str, _Run] = {}  # what is cached of a conversation behind its head
        self._heads: dict[str, _Head] = {}

    def hit(self, prompt: Prompt, most: int) -> tuple[int, int]:
        """Cached leading blocks of a prompt, at most `most`, and how many of them are free now."""
        found = free = 0
        if prompt.head is not None:
            head = self._heads.get(prompt.head)
            if head is None:
                return 0, 0
            found = min(head.extent, most)
            free = 0 if head.users else found
            if head.extent < prompt.head_blocks:
                return found, free
        run = self._runs.get(prompt.conversation)
        if run is not None:
            valid = min(run.high, prompt.common(run.turn) // self.block, most)
            more = max(valid - prompt.head_blocks, 0)
            return found + more, free + more
        return found, free

    def take(self, prompt: Prompt, hit: int) -> None:
        """Hold the first `hit` blocks of a prompt, which are cached."""
        behind = hit - min(hit, prompt.head_blocks)
        run = self._runs.pop(prompt.conversation, None)
        if run is not None:
            self.free -= behind
            run.low += behind
            run.owner = None
            if run.low >= run.high:
                del self._queue[id(run)]
        if prompt.head is not None:
            head = self._heads.setdefault(prompt.head, _Head())
            if not head.users and head.run is not None:
                self.free -= head.extent
                del self._queue[id(head.run)]
                head.run = None
            head.users += 1
        prompt.held = hit

    def grow(self, prompt: Prompt, blocks: int) -> bool:
        """Hold `blocks` blocks in all, evicting the oldest; False, and nothing done, if too few are free."""
        needed = blocks - prompt.held
        if needed > self.free:
            return False
        if needed > 0:
            self._evict(needed - min(needed, self._empty))
            self._empty -= min(needed, self._empty)
            self.free -= needed
            prompt.held = blocks
        return True

    def publish(self, prompt: Prompt, full: int) -> None:
        """Let the first `full` blocks of a prompt's head be found by others."""
        if prompt.head is not None:
            head = self._heads[prompt.head]
            head.extent = max(head.extent, min(full, prompt.head_blocks))

    def release(self, prompt: Prompt, full: int) -> None:
        """Give all blocks of a prompt back; the first `full` of them stay cached until evicted."""
        shared = min(prompt.head_blocks, full) if prompt.head is not None else 0
        self.free += prompt.held - shared
        self._empty += prompt.held - full
        if full > prompt.head_blocks:
            run = _Run(prompt.conversation, prompt.turn, prompt.head_blocks, full)
            self._runs[prompt.conversation] = self._queue[id(run)] = run
        if prompt.head is not None:
            head = self._heads[prompt.head]
            head.users -= 1
            if not head.users and head.extent:
                head.run = _Run(head, 0, 0, head.extent)
                self._queue[id(head.run)] = head.run
                self.free += head.extent
        prompt.held = 0

    def _evict(self, blocks: int) -> None:
        self.evicted += blocks
        while blocks > 0:
            key, run = next(iter(self._queue.items()))
            gone = min(blocks, run.high - run.low)
            run.high -= gone
            blocks -= gone
            if isinstance(run.owner, _Head):
                run.owner.extent = run.high
            if run.low >= run.high:
                del self._queue[key]
                if isinstance(run.owner, _Head):
                    run.owner.run = None
                elif run.owner is not None:
                    del self._runs[run.owner]
