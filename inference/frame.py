"""A request body around its messages: a few kilobytes that say where everything lies in megabytes.

The messages of a chat request are found in the one scan that checks its body, but not where they stand in
it. Their place is searched for and then proved by a scan of the rest, so that members can be found and
replaced without another scan of the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WHITESPACE: Final = b" \t\r\n"
_SEPARATORS: Final = WHITESPACE + b","
_NAME: Final = b'"messages"'
_CUT: Final = b"0"
_CANDIDATES: Final = 8
_COLON: Final = 0x3A
_OPEN: Final = 0x5B
_CLOSE: Final = 0x5D
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

Span = tuple[int, int]


class Frame(Record, frozen=True):
    """A body whose messages lie at `raw[start:end]`, each at one of `spans`.

    `text` is the body with a number in their place, `members` what a reader finds in it.
    """

    text: bytes
    members: Mapping[str, msgspec.Raw]
    start: int
    end: int
    spans: Sequence[Span]

    def holds(self, position: int) -> bool:
        """Whether a place in the body is inside the array of messages."""
        return self.start < position < self.end

    def outer(self, span: Span) -> Span:
        """Where a part of `text` lies in the body, if it does not touch the messages."""
        shift = self.end - self.start - len(_CUT) if span[0] > self.start else 0
        return span[0] + shift, span[1] + shift


def framed(raw: bytes, items: Sequence[msgspec.Raw]) -> Frame | None:
    """The frame of a JSON object whose last member `messages` is an array of these items, in order.

    None where their place is not certain. A candidate is an array that the lengths of the items lead
    through to a closing bracket, and whose place in the rest, once a number stands there, is that of the
    last `messages`. It is the right one: an earlier array of that name would have to hide the last one in
    what is cut out; but each item ends with a byte that is no separator, so the lengths lead from an
    earlier start to a bracket inside the last array, and what follows it closes too many brackets or
    quotes for the rest to be JSON.
    """
    at = -1
    for _ in range(_CANDIDATES):
        at = raw.find(_NAME, at + 1)
        if at < 0:
            return None
        start = _past(raw, _past(raw, at + len(_NAME), _COLON), _OPEN) - 1
        spans = walked(raw, start, items) if start > 0 else None
        if spans is None:
            continue
        end = _past(raw, spans[-1][1] if spans else start + 1, _CLOSE)
        frame = frame_at(raw, start, end, spans) if end > 0 else None
        if frame is not None:
            return frame
    return None


def frame_at(raw: bytes, start: int, end: int, spans: Sequence[Span]) -> Frame | None:
    """The frame around an array, or None if it is not the value of the last `messages` of an object."""
    text = raw[:start] + _CUT + raw[end:]
    try:
        members = _MEMBERS.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if bytes(members.get("messages", b"")) != _CUT:
        return None
    return Frame(text, members, start, end, spans)


def walked(raw: bytes, start: int, items: Sequence[msgspec.Raw]) -> list[Span] | None:
    """Where items of an array lie that begins at `start`; None if the bytes end before them."""
    spans: list[Span] = []
    position = start + 1
    try:
        for item in items:
            while raw[position] in _SEPARATORS:
                position += 1
            spans.append((position, position := position + memoryview(item).nbytes))
    except IndexError:
        return None
    return spans


def _past(raw: bytes, position: int, character: int) -> int:
    """The place behind a character that is next but for white space; 0 where it is not, or `position` is."""
    if position <= 0:
        return 0
    while position < len(raw) and raw[position] in WHITESPACE:
        position += 1
    return position + 1 if position < len(raw) and raw[position] == character else 0
