"""HTTP/1.1 towards a replica: one connection that carries one exchange at a time.

The parts of a body are gathered as httptools finds them, so that a stream of many small chunks costs
nothing per chunk but its parsing: a general client's work on each of them is more than all the rest of
what the gateway does for a stream.

    ask() ──> status, headers ──> next_part() ... b"" ──> reusable, or closed

The connection may break at any point; what had arrived before is handed out first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.inference.wire import Pieces

READ_BUFFER: Final = 2**18  # bytes that may wait to be taken; then the replica has to
MAX_HEAD_BYTES: Final = 2**16
_JOINED_UP_TO: Final = 2**16


class Origin(NamedTuple):
    """Where connections lead: a host's name or address, a port, and whether TLS is spoken there."""

    host: str
    port: int
    tls: bool


class Connection(asyncio.Protocol):
    """One connection. `status` is 0 until an answer's head is there; `headers` has lower-case names.

    `whole`: the answer is complete, perhaps with parts not taken yet. `since`: when it became so, on the
    loop's clock. `ended` is called once when the connection is gone.
    """

    __slots__ = (
        "_busy", "_failure", "_held", "_keeps", "_loop", "_parser", "_parts", "_paused", "_to_the_end",
        "_transport", "_waiter", "closed", "ended", "headers", "on_body", "origin", "since", "status",
        "whole",
    )  # fmt: skip

    def __init__(self, origin: Origin, ended: Callable[[Connection], None]) -> None:
        self.origin = origin
        self.ended = ended
        self.closed = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.whole = False
        self.since = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self._parts.append  # called by the parser
        self._held = 0  # bytes that came since parts were last taken
        self._paused = False
        self._busy = False
        self._keeps = False
        self._to_the_end = False  # the body ends with the connection
        self._failure: str | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def ask(self, head: bytes, body: Pieces) -> None:
        """Send a request and wait for its answer's head. Raises ConnectionError.

        The pieces of a long body are not copied, and must not change.
        """
        self.status = 0
        self.headers = {}
        self.whole = self._keeps = self._to_the_end = False
        self._busy = True
        if self._transport is None or self.closed:
            raise ConnectionResetError("the connection is closed")
        if sum(map(len, body)) > _JOINED_UP_TO:
            self._transport.writelines((head, *body))
        else:
            self._transport.write(b"".join((head, *body)))
        while not self.status:
            self._raise_failure()
            await self._woken()

    async def next_part(self) -> bytes:
        """What has arrived since the last call, at least a byte; b"" at the end. Raises ConnectionError."""
        parts = self._parts
        while not parts:
            if self.whole:
                return b""
            self._raise_failure()
            await self._woken()
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            if self._transport is not None and not self.closed:
                self._transport.resume_reading()
        return data

    @property
    def at_end(self) -> bool:
        """Whether the answer is complete and all of it was taken."""
        return self.whole and not self._parts

    @property
    def reusable(self) -> bool:
        """Whether the next exchange may go over this connection."""
        return self.at_end and self._keeps and not self.closed and not self._paused

    def rest(self) -> None:
        """The exchange is over; whatever comes now was not asked for."""
        self._busy = False

    def abort(self) -> None:
        """Close at once, also with bytes not sent yet; idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ConnectionResetError(self._failure)

    async def _woken(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, why: str) -> None:
        """Nothing more can come over this connection."""
        self._keeps = False
        if not self.whole and self._failure is None:
            self._failure = why
        self.abort()

    # ---- called by the event loop ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = transport  # type: ignore[assignment]  # of a stream protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: the end of some bodies, the break of all others."""
        self.closed = True
        del self._parser  # it refers back to here: left to the garbage collector, both would stay long
        if self._to_the_end and exc is None and self._failure is None:
            self.whole = True
        elif not self.whole and self._failure is None:
            self._failure = "the connection ended before the answer was whole"
        self._wake()
        self.ended(self)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if not self._busy:
            self._fail("bytes came that nobody had asked for")
            return
        self._held += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not valid HTTP: {type(error).__name__}")
        if not self.status and self._held > MAX_HEAD_BYTES:
            self._fail("the answer's head is too large")
        elif self._held > READ_BUFFER and not self._paused:
            self._hold_up()
        self._wake()

    def _hold_up(self) -> None:
        """Read no more until what came is taken."""
        if not self._parts:
            self._fail("the answer is all framing and no body")
        elif self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    # ---- called by the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins. Raises ValueError after a whole one, which the parser makes its own error."""
        if self.whole:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; of a repeated one the first counts, and what trails a body is of no use."""
        if not self.status:
            self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        """The head is whole; that of an interim answer (1xx) is dropped."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}
            return
        self.status = status
        sized = b"content-length" in self.headers
        self._to_the_end = not sized and b"chunked" not in self.headers.get(b"transfer-encoding", b"").lower()

    def on_message_complete(self) -> None:
        """The answer is whole, unless it was an interim one."""
        if self.status:
            self.whole = True
            self._keeps = bool(self._parser.should_keep_alive())
            self.since = self._loop.time()
