"""uvicorn's HTTP/1.1 protocol with bounds on a request's head, and answers in OpenAI's envelope.

uvicorn reads a head of any size for any time, and loses the body of a request that offers an upgrade:
Java's HTTP client offers `h2c` with every request unless it is told not to. It does not notice that a
client has left which has sent a second request meanwhile, and sends chunks to HTTP/1.0, which knows none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ctxgate.gateway.edge import BODY_IS_WHOLE, WHEN_LEFT
from ctxgate.gateway.errors import Kind, Refused, body_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_HEAD_BYTES: Final = 2**18
HEAD_TIMEOUT_S: Final = 60.0
# While a request is answered, so many more are read: a client's going is seen only where it is read from.
MAX_PIPELINED: Final = 8
# Bytes of a body that wait to be taken before no more are read. uvicorn's 64 KiB would take a conversation of
# a hundred thousand tokens in seven steps, each a turn of the event loop and a copy.
MOST_WAITING: Final = 2**20
_OF_AN_UPGRADE: Final = (b"upgrade", b"connection", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

    _head_bytes = 0
    _head_open = False
    _head_timer: asyncio.TimerHandle | None = None
    _on_left: Callable[[], None] | None = None
    _running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the latest, which may be waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """A client connected; its first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._head_came()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._on_left is not None:
                self._on_left()

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that grows or lasts too long ends the connection."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = self._read(rest)
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP.")
            return
        if self._head_open and not self.transport.is_closing():
            self._head_bytes += len(data)
            self._await_head()
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; that of an upgrade is read again without it."""
        if self._upgrades():
            return
        self._head_open = False
        self._head_bytes = 0
        self._head_came()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of the body came; it waits until the application takes it."""
        cycle = self.cycle
        if self._upgrades() or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > MOST_WAITING:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is whole, unless it was only the head of one that offered an upgrade."""
        if not self._upgrades():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and close."""
        body = body_of(Refused(Kind.INVALID_VALUE, msg))
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % len(body) + body)
        self.transport.close()

    def _upgrades(self) -> bool:
        return bool(self.parser.should_upgrade())

    def _read(self, data: memoryview) -> memoryview:
        """Parse up to the end of the data, or of the first head that offers an upgrade; returns the rest.

        Such a request is answered by this protocol, as RFC 9110 (7.8) allows: its head is read again
        without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT is not offered.")
            else:
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
                return data[upgrade.args[0] :]
        return data[:0]

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.scope["headers"] if name not in _OF_AN_UPGRADE]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        self._on_left = None
        extensions: dict[str, object] = cycle.scope.setdefault("extensions", {})  # type: ignore[assignment]  # ASGI's are dicts
        extensions[WHEN_LEFT] = self._when_left
        extensions[BODY_IS_WHOLE] = self._body_is_whole
        super()._start_asgi_task(cycle, _close_delimited(app, cycle) if _is_1_0(cycle) else app)

    def _body_is_whole(self) -> bool:
        """Whether all of the running request's body has come."""
        return self._running is not None and not self._running.more_body

    def _when_left(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before the running answer is whole; None: no more.

        A task that waits for ASGI's message of it would cost as much as much of the rest of a request.
        """
        self._on_left = callback
        if callback is not None and self._running is not None:
            self.flow.resume_reading()  # paused, the connection would not tell
            if self._running.disconnected:
                callback()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self.transport.close()


def _is_1_0(cycle: RequestResponseCycle) -> bool:
    return cycle.scope["http_version"] == "1.0"


def _close_delimited(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """For HTTP/1.0: a body of unknown length ends with the connection, where uvicorn would send chunks."""

    async def answered(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        unbounded = False

        async def sent(message: ASGISendEvent) -> None:
            nonlocal unbounded
            if message["type"] == "http.response.start":
                unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unbounded:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and unbounded:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answered
