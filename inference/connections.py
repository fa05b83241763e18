"""Connections to the replicas: aiohttp's pool, TLS and parser, without its session for what is posted.

A `ClientSession` prepares every request for cookies, redirects, proxies, traces and uploads that are made
while they are sent. A call to a replica has none of these, and at the pace of short requests they are a
third of the client's work. So a request goes straight from the connector's pool to the socket.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from ctxgate.inference.wire import Pieces

IDLE_CONNECTION_S: Final = 3.5
READ_BUFFER: Final = 2**18
_MOST_TARGETS: Final = 1024
_JOINED_UP_TO: Final = 2**16  # bytes: of a longer body no copy is made
_INFORMATIONAL: Final = range(100, 200)


class Protocol(ResponseHandler):
    """aiohttp's client protocol (3.14) without five of its mistakes.

    - A body's reader is forgotten when the body's framing is broken, and waits for ever.
    - A body that ends with its connection counts as whole also where the connection was reset.
    - What came over an idle connection is taken for the answer to its next request.
    - Whenever a part of a body is taken, the parser runs again, also where nothing was held back: with
      a part per token that is most of the work on a stream.
    - The parts that came in one read are taken one by one, to be put together again.
    """

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        super().data_received(data)
        payload = self._payload
        if type(payload) is aiohttp.StreamReader:
            parts = payload._buffer
            if len(parts) > 1 and not payload._buffer_offset:
                whole = b"".join(parts)
                parts.clear()
                parts.append(whole)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on where reading was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Wake whoever reads a body that did not end."""
        payload = self._payload
        if payload is None or payload.is_eof():
            super().connection_lost(exc)
            return
        broken = aiohttp.ClientPayloadError("the connection ended inside the body")
        if exc is not None:
            payload.set_exception(broken)
        super().connection_lost(exc)
        if not payload.is_eof() and payload.exception() is None:
            payload.set_exception(broken)

    def is_connected(self) -> bool:
        """Whether the next request may go over this connection."""
        return super().is_connected() and not self.should_close


class Connector(aiohttp.TCPConnector):
    """Connections that speak `Protocol`."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        self._factory = partial(Protocol, loop=asyncio.get_running_loop())  # type: ignore[assignment]  # a subclass


class _Target:
    """Where calls to one URL go, and how each of them begins."""

    __slots__ = ("request", "start")

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        where = URL(url)
        # Never sent: the connector reads host, port and TLS from it.
        self.request = aiohttp.ClientRequest("POST", where, loop=asyncio.get_running_loop(), session=session)
        self.start = (
            f"POST {where.raw_path_qs} HTTP/1.1\r\nHost: {self.request.headers['Host']}\r\nAccept: */*\r\n"
        )


class Calls:
    """POST requests whose body is there when they are sent.

    A body waits in the transport's buffer until the replica takes it, which costs nothing: the buffer holds
    the very pieces, which their request holds as long as it is open.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout) -> None:
        connector = session.connector
        if connector is None:
            raise RuntimeError("the session is closed")
        self._connector = connector
        self._session = session
        self._timeout = timeout
        self._targets: dict[str, _Target] = {}

    async def post(
        self, url: str, body: Pieces, headers: Mapping[str, str]
    ) -> tuple[RawResponseMessage, aiohttp.StreamReader, Connection]:
        """Send a request: the answer's head, its body, and the connection, which the body's end gives back.

        Raises ValueError for a header with a line break, TimeoutError where nobody answers the connection,
        `aiohttp.ClientError` and ConnectionError.
        """
        target = self._targets.get(url) or self._new_target(url)
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if fields.count("\n") != len(headers) or fields.count("\r") != len(headers) or "\0" in fields:
            raise ValueError("a header has a line break or a null character")
        size = sum(map(len, body))
        head = f"{target.start}{fields}Content-Length: {size}\r\n\r\n".encode()
        parts = [b"".join((head, *body))] if size <= _JOINED_UP_TO else [head, *body]
        connection = await self._connector.connect(target.request, [], self._timeout)
        try:
            message, payload = await _asked(connection, parts)
        except BaseException:
            connection.close()
            raise
        payload.on_eof(partial(_give_back, connection))
        return message, payload, connection

    def _new_target(self, url: str) -> _Target:
        if len(self._targets) >= _MOST_TARGETS:  # a reload leaves the URLs of the pools before it
            self._targets.clear()
        target = self._targets[url] = _Target(url, self._session)
        return target


def _give_back(connection: Connection) -> None:
    """To the pool, unless a part of the request is still to be sent: the answer came before all of it."""
    if (transport := connection.transport) is not None and transport.get_write_buffer_size():
        connection.close()
    else:
        connection.release()


async def _asked(
    connection: Connection, request: Sequence[bytes | memoryview]
) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
    """Write a request and wait for the head of its answer."""
    protocol = connection.protocol
    if protocol is None or protocol.transport is None:
        raise aiohttp.ClientConnectionResetError("the connection closed before the request was sent")
    protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=READ_BUFFER)
    protocol.transport.writelines(request)
    while True:
        try:
            message, payload = await protocol.read()
        except HttpProcessingError as error:
            raise aiohttp.ClientConnectionError("the answer is not HTTP") from error
        if message.code not in _INFORMATIONAL or message.code == 101:
            return message, payload
