"""The order of an engine's event messages: which one may be read next, and what an odd number means.

Numbers count from 0 from the engine's start. What was read once is never read again, so that a late replay
cannot bring back what a later message took away. An old number with another content is another engine's.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ctxgate.inference.kv_events import Message

_REMEMBERED: Final = 1024  # messages: more do not come live while their replay is read


class Verdict(StrEnum):
    """What to do with a message: read it, pass over it, fetch what is missing before it, or begin anew."""

    NEXT = "next"
    OLD = "old"
    GAP = "gap"
    RESTARTED = "restarted"


class Order:
    """Follows one stream. `next` is the number that comes next."""

    def __init__(self) -> None:
        self.next = 0
        self._read: deque[bytes] = deque(maxlen=_REMEMBERED)  # digests of the last ones, the newest last

    @property
    def resume(self) -> int:
        """Where to ask for a replay from: the last message read, so that its content can be compared."""
        return max(self.next - 1, 0) if self._read else self.next

    def judge(self, message: Message) -> Verdict:
        """What to do with a message of the live stream or of a replay."""
        behind = self.next - message.sequence
        if behind == 0:
            return Verdict.NEXT
        if behind < 0:
            return Verdict.GAP
        same = behind <= len(self._read) and self._read[-behind] == _digest(message)
        return Verdict.OLD if same else Verdict.RESTARTED

    def read(self, message: Message) -> None:
        """A message that is next is read now."""
        self.next = message.sequence + 1
        self._read.append(_digest(message))

    def begin(self, at: int) -> None:
        """Another stream, or the same one behind what is lost: the message with this number comes next."""
        self.next = at
        self._read.clear()


def _digest(message: Message) -> bytes:
    return blake2b(message.batch or b"", digest_size=16).digest()
