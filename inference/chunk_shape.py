"""What the ordinary events of one stream have in common: every byte but the text.

An engine writes each chunk of plain text alike, so a run of them is told by counting: so many heads, so
many tails, and no quote, backslash or line end beside those in them. A text without a quote cannot end
early, and so nothing but text differs between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

UNFINISHED: Final = b'"finish_reason":null'
_TEXT_BEGINS: Final = (b'"content":"', b'"text":"', b'"reasoning":"', b'"reasoning_content":"')


class Shape:
    """The head and the tail of a stream's ordinary events. `envelope` is the bytes of both."""

    __slots__ = ("_head", "_next", "_quotes", "_tail", "envelope")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head = head
        self._tail = tail
        self._next = b"\n\n" + head
        self.envelope = len(head) + len(tail)
        self._quotes = head.count(b'"') + tail.count(b'"')

    def run(self, read: bytes) -> tuple[int, int]:
        """The bytes and the number of the events of this shape that a read begins with.

        None, (0, 0), also where there are some, but others stand among them.
        """
        if not read.startswith(self._head):
            return 0, 0
        length = read.rfind(self._tail) + len(self._tail)
        if length < self.envelope or b"\\" in read or b"\r" in read:
            return 0, 0
        if length != len(read):
            read = read[:length]
        events = read.count(self._tail)
        if read.count(b"\n") != 2 * events or read.count(b'"') != events * self._quotes:
            return 0, 0
        if events > 1 and read.count(self._next) != events - 1:
            return 0, 0
        return length, events


def shape_of(event: bytes, text_bytes: int, marks: Iterable[bytes]) -> Shape | None:
    """The shape of an event that carries `text_bytes` of text; None unless it is an ordinary one.

    `marks` are what no ordinary event holds.
    """
    if event.count(b"\n") != 2 or b"\\" in event or b"\r" in event or event.count(UNFINISHED) != 1:
        return None
    if not (event.startswith(b"data: {") and event.endswith(b"\n\n")) or any(mark in event for mark in marks):
        return None
    for begins in _TEXT_BEGINS:
        start = event.find(begins) + len(begins)
        end = event.find(b'"', start)
        if start >= len(begins) and end - start == text_bytes:
            return Shape(event[:start], event[end:])
    return None
