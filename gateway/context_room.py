"""How many compactions may be under way: few at each replica, and few bytes of prompts that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Final

AT_ONCE: Final = 4
"""Summary calls in flight at one replica: each takes a place from the requests of clients."""

WAITING: Final = 32
"""Compactions at one replica, those that wait included. What comes beyond is decided on again later."""

HELD_BYTES: Final = 128 * 2**20
"""Of the prompts that all of them hold."""


class Room:
    """Belongs to one event loop. A replica goes by its names of pool and replica."""

    def __init__(self) -> None:
        self._bytes = 0
        self._taken: Counter[tuple[str, str]] = Counter()
        self._turns: defaultdict[tuple[str, str], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE)
        )

    def take(self, replica: tuple[str, str], size: int) -> bool:
        """Whether one more may wait there that holds so many bytes; a single one always may."""
        if self._taken[replica] >= WAITING or (self._bytes and self._bytes + size > HELD_BYTES):
            return False
        self._taken[replica] += 1
        self._bytes += size
        return True

    def give_back(self, replica: tuple[str, str], size: int) -> None:
        """The end of one that was taken in."""
        self._taken[replica] -= 1
        self._bytes -= size

    def turn(self, replica: tuple[str, str]) -> asyncio.Semaphore:
        """To be held while a compaction works at the replica."""
        return self._turns[replica]
