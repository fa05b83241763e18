"""A stream on its way through: reads of the upstream go in, what the client is to get comes out.

    read ──> ordinary text ──────────────────> as it is (most of a stream)
         └─> whole events ──> StreamReader ──┬> forwarded, changed or withheld
                                             └> the end marker: kept back

An event that is not whole waits for its rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.inference.sse import SseSplitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.inference.chat_stream import StreamReader


class StreamRelay:
    """Passes one stream on, event by event, through a `StreamReader` that gathers its facts.

    `end_marker` is the `[DONE]` event, which its user sends when the call is booked; empty until it came.
    `priced` is called once, with the event that tells the whole call's usage if the client gets to see
    it, else with the next one that it sees; what it returns is forwarded instead.
    """

    __slots__ = ("_priced", "_reader", "_splitter", "end_marker")

    def __init__(self, reader: StreamReader, priced: Callable[[bytes], bytes] | None = None) -> None:
        self._reader = reader
        self._priced = priced
        self._splitter = SseSplitter()
        self.end_marker = b""

    def take(self, read: bytes) -> bytes:
        """The bytes to forward for one read, itself where nothing changes. Raises `EventTooLarge`."""
        reader = self._reader
        out: list[bytes] = []
        while read:
            length = reader.skim(read) if self._splitter.empty else 0
            if length:
                out.append(read[:length])
            else:
                # Before the first text an event is read at a time, so that the rest can be skimmed.
                first = not reader.content_events and self._splitter.empty
                length = read.find(b"\n\n") + 2 if first else len(read)
                length = length if length > 1 else len(read)
                out += self._events(read[:length])
            read = read[length:]
        return out[0] if len(out) == 1 else b"".join(out)

    def close(self) -> bytes:
        """The bytes to forward of a last event that came without its blank line."""
        self._priced = None  # its owner owns this relay: left to the garbage collector, both would stay long
        if self.end_marker:
            return b""
        tail = self._reader.close(self._splitter.tail())
        if not self._reader.done:
            return tail
        self.end_marker = tail
        return b""

    def _events(self, read: bytes) -> list[bytes]:
        """The events completed by a part of a read that go on to the client."""
        reader = self._reader
        out: list[bytes] = []
        for event in self._splitter.feed(read):
            forwarded = reader.on_event(event)
            if reader.done:
                self.end_marker = self.end_marker or forwarded or b""
            elif forwarded is not None:
                priced = self._priced
                if priced is not None and reader.meter.closed:
                    self._priced = None
                    forwarded = priced(forwarded)
                out.append(forwarded)
        return out
