"""Server-sent events: an incremental splitter that never changes a byte.

No I/O. The splitter cuts a byte stream into whole events; the pieces joined are the stream. Line ends
are LF, CRLF or CR, also mixed (HTML standard, section 9.2.5); an event ends with its blank line. How
the stream was chunked never shows in the result.
"""

from __future__ import annotations

import re
from typing import Final

MAX_EVENT_BYTES: Final = 16 * 2**20
DONE: Final = b"[DONE]"

_BOM: Final = b"\xef\xbb\xbf"
# A line end followed by a blank line. A CR at the end of the input may be half of a CRLF, so after a LF
# it has to be followed by something; after a CR it is taken as it stands.
_END: Final = re.compile(rb"\n\n|\r\r|\n\r\n|\n\r(?=[^\n])")
_LONGEST_END: Final = 3


class EventTooLarge(ValueError):
    """An event is longer than the splitter's bound; the stream cannot be followed any further."""


class SseSplitter:
    """Cuts a stream of chunks into whole events, keeping only the incomplete tail."""

    __slots__ = ("_max", "_pending")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events completed by this chunk, each with its blank line.

        Raises EventTooLarge once an event exceeds the bound; events complete before it are returned
        first, and the error comes with the next call.
        """
        if not self._pending and chunk.endswith(b"\n\n") and b"\r" not in chunk and len(chunk) <= self._max:
            if chunk.find(b"\n\n") == len(chunk) - 2:
                return [chunk]
            if (events := self._split_lf(chunk)) is not None:
                return events
        return self._feed(chunk)

    @property
    def empty(self) -> bool:
        """Whether everything fed so far was whole events."""
        return not self._pending

    def tail(self) -> bytes:
        """What is left after the last complete event."""
        return bytes(self._pending)

    def _split_lf(self, chunk: bytes) -> list[bytes] | None:
        """Whole events only, LF only: the usual chunk of several events. None if it is not that plain."""
        parts = chunk.split(b"\n\n")
        if not parts.pop() and all(parts):
            return [part + b"\n\n" for part in parts]
        return None

    def _feed(self, chunk: bytes) -> list[bytes]:
        pending = self._pending
        scanned = max(len(pending) - _LONGEST_END, 0)
        if len(pending) > self._max:
            raise EventTooLarge(f"an event exceeds {self._max} bytes")
        pending += chunk
        events: list[bytes] = []
        start = 0
        while (found := _END.search(pending, scanned)) is not None:
            end = found.end()
            if end - start > self._max:
                break
            events.append(bytes(pending[start:end]))
            start = scanned = end
        if start:
            del pending[:start]
        if not events and len(pending) > self._max:
            raise EventTooLarge(f"an event exceeds {self._max} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """The event's payload: its data lines joined with LF; None when it has none (a comment)."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n"):
        payload = event[6:-2]
        if b"\n" not in payload and b"\r" not in payload:
            return payload
    lines = [value for name, value in fields_of(event) if name == b"data"]
    return b"\n".join(lines) if lines else None


def name_of(event: bytes) -> bytes | None:
    """The event's `event:` field, or None."""
    names = [value for name, value in fields_of(event) if name == b"event"]
    return names[-1] if names else None


def fields_of(event: bytes) -> list[tuple[bytes, bytes]]:
    """All fields of an event in order, comments left out."""
    fields: list[tuple[bytes, bytes]] = []
    for line in event.removeprefix(_BOM).splitlines():
        name, _, value = line.partition(b":")
        if name:
            fields.append((name, value.removeprefix(b" ")))
    return fields
