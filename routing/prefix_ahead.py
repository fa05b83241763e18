"""What replicas are about to read: prompts that were sent there and are not settled. Pure.

An entry ends with `end`, or by its time limit where nobody ends it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_US: Final = 600_000_000  # a prompt of a million tokens may wait and be read for minutes


class _Sent(NamedTuple):
    links: Sequence[bytes]
    until_us: int


class Ahead:
    """The prompts sent to one replica, by the tickets of their attempts."""

    __slots__ = ("_limit_us", "_sent", "tokens")

    def __init__(self, limit_us: int = LIMIT_US) -> None:
        self._limit_us = limit_us
        self._sent: dict[str, _Sent] = {}
        # Tokens up to each link, and how many prompts that are under way have it.
        self.tokens: dict[bytes, tuple[int, int]] = {}

    def begin(
        self,
        ticket: str,
        links: Sequence[bytes],
        sizes: Sequence[int],
        span: tuple[int, int],
        now_us: int,
    ) -> None:
        """Note the links of a prompt that the replica does not know yet.

        `span`: the prompt's tokens before them and with them; between the two they are apportioned by the
        links' `sizes` in bytes.
        """
        self.end(ticket)
        self.expire(now_us)
        if not links:
            return
        start, prompt = span
        ends = list(accumulate(sizes))
        rest, size = max(prompt - start, 0), max(ends[-1], 1)
        for link, end in zip(links, ends, strict=True):
            known = self.tokens.get(link)
            self.tokens[link] = (start + rest * end // size, 1) if known is None else (known[0], known[1] + 1)
        self._sent[ticket] = _Sent(links, now_us + self._limit_us)

    def end(self, ticket: str) -> None:
        """Take a prompt out again; nothing where there is none of this ticket."""
        sent = self._sent.pop(ticket, None)
        for link in () if sent is None else sent.links:
            tokens, count = self.tokens[link]
            if count > 1:
                self.tokens[link] = (tokens, count - 1)
            else:
                del self.tokens[link]

    def expire(self, now_us: int) -> None:
        """Take out the prompts whose time is over: they stand in the order of that."""
        while self._sent:
            ticket, sent = next(iter(self._sent.items()))
            if sent.until_us > now_us:
                return
            self.end(ticket)
