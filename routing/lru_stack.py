"""How many tokens a cache has read since a prompt was read last: its place in the order of eviction.

An engine evicts the block that was used longest ago, of one prompt's blocks the last ones first. So a token
is still held while fewer others than the cache has room for were read after it, each counted once however
often it was read. Pure.

Cost: each operation takes some dozen steps, however many prompts there were.
"""

from __future__ import annotations

from typing import Final

SLOTS: Final = 4096  # uses that are told apart for each cache; the oldest ones are then held to be evicted


class Use:
    """One time that a replica read a prompt: when (microseconds), and what it had written by then.

    `read` are the tokens that it had read by then, this prompt and all repeats counted. `held` are the
    tokens of it that were not read again since. `end` is the prompt's last link and `answer` how many
    tokens the engine generated behind it. `slot` is its place in the order, negative once it is out of it.
    """

    __slots__ = ("answer", "at_us", "end", "held", "read", "slot", "written")

    def __init__(self, at_us: int, written: int, read: int = 0, end: tuple[bytes, int] = (b"", 0)) -> None:
        self.at_us = at_us
        self.written = written
        self.read = read
        self.end, self.answer = end
        self.held = 0
        self.slot = -1


class LruStack:
    """Uses in their order. `slots` is how many there may be, at least 2."""

    __slots__ = ("_live", "_slots", "_sums", "total")

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._live: list[Use] = []
        self._sums: list[int] = []  # a Fenwick tree over the slots, as long as it is needed
        self.total = 0  # tokens of all uses in the order

    def push(self, use: Use, tokens: int) -> None:
        """Put a use with so many tokens before all others."""
        if len(self._live) == self._slots:
            self._compact()
        use.slot, use.held = len(self._live), tokens
        self._live.append(use)
        self._append(tokens)
        self.total += tokens

    def take(self, use: Use, tokens: int) -> None:
        """Take tokens from a use, at most those that it holds: they were read again, by a later one."""
        tokens = min(tokens, use.held)
        if use.slot < 0 or tokens <= 0:
            return
        use.held -= tokens
        self.total -= tokens
        at = use.slot + 1
        while at <= len(self._sums):
            self._sums[at - 1] -= tokens
            at += at & -at

    def above(self, use: Use) -> int | None:
        """Tokens that were read after a use; None where that is too long ago to be known."""
        if use.slot < 0:
            return None
        at, upto = use.slot + 1, 0
        while at > 0:
            upto += self._sums[at - 1]
            at -= at & -at
        return self.total - upto

    def _append(self, tokens: int) -> None:
        at = len(self._sums) + 1
        below, end = at - 1, at - (at & -at)
        while below > end:
            tokens += self._sums[below - 1]
            below -= below & -below
        self._sums.append(tokens)

    def _compact(self) -> None:
        """Leave out the uses that hold nothing any more, and of too many others the oldest."""
        live = [use for use in self._live if use.held]
        kept = live[-(self._slots // 2) :]
        for use in self._live:
            use.slot = -1
        self._live, self._sums = [], []
        for at, use in enumerate(kept):
            use.slot = at
            self._live.append(use)
            self._append(use.held)
        self.total = sum(use.held for use in kept)
