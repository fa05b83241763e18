"""The HTTP client towards the replicas.

    open() ── sends one request, returns at the response's headers
      Unreachable   no connection; nothing was sent
      Dropped       the connection broke after the request went out, before any answer
    UpstreamResponse.next_chunk() ── the body as it arrives
      Dropped       the connection broke inside the answer
    abort() ── ends a call by its id, so that its usage can still be read

Redirects are not followed, cookies not kept, bodies not decompressed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from ctxgate.inference.http_connection import Origin
from ctxgate.inference.http_pool import ConnectionPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.inference.http_connection import Connection
    from ctxgate.inference.wire import Pieces

_ABORT_PATH: Final = "/inference/v1/abort_requests"
_ABORT_TIMEOUT_S: Final = 5.0
_MAX_DOCUMENT_BYTES: Final = 2**24
_PORTS: Final = {"http": 80, "https": 443}
_JSON: Final = b"application/json"


class UpstreamFailed(Exception):
    """A replica gave no whole answer."""


class Unreachable(UpstreamFailed):
    """No connection could be made; the engine saw nothing."""


class ConnectTimedOut(Unreachable):
    """Nobody answered in time; something may be there all the same."""


class Dropped(UpstreamFailed):
    """The connection broke after the request was sent."""


class AnswerTooLarge(UpstreamFailed):
    """The answer is longer than the gateway takes."""


class UpstreamResponse:
    """One response, its headers read and its body arriving."""

    __slots__ = ("_connection", "_pool", "_released", "raw_content_type", "status")

    def __init__(self, connection: Connection, pool: ConnectionPool) -> None:
        self._connection = connection
        self._pool = pool
        self._released = False
        self.status: int = connection.status
        self.raw_content_type: bytes = connection.headers.get(b"content-type", _JSON)

    @property
    def is_json(self) -> bool:
        """Whether the body is JSON."""
        return self.raw_content_type.partition(b";")[0].strip().lower().endswith(b"json")

    @property
    def metadata(self) -> bytes:
        """vLLM's `metadata` header, which describes an answer of raw bytes; empty without one."""
        return self._connection.headers.get(b"metadata", b"")

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.raw_content_type.startswith(b"text/event-stream")

    async def next_chunk(self) -> bytes:
        """The bytes that have arrived since the last call; none at the end. Raises `Dropped`.

        What arrived before a connection broke is given before the error is raised.
        """
        try:
            return await self._connection.next_part()
        except ConnectionError as error:
            raise Dropped(str(error)) from error

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises `Dropped`, and `AnswerTooLarge` beyond `limit` bytes."""
        body = await self.start_of_body(limit + 1)
        if len(body) > limit:
            raise AnswerTooLarge
        return body

    async def start_of_body(self, limit: int) -> bytes:
        """The body, or as much of it as brings it to `limit` bytes or beyond. Raises `Dropped`."""
        parts: list[bytes] = []
        size = 0
        while size < limit and (chunk := await self.next_chunk()):
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts)

    async def drain(self, seconds: float) -> None:
        """Read what is left of the body, so that its connection can be used again; never raises."""
        if self._connection.at_end:
            return
        with suppress(Dropped, TimeoutError):
            async with asyncio.timeout(seconds):
                while await self.next_chunk():
                    pass

    def close(self) -> None:
        """The exchange is over. After half an answer the engine ends the call: it sees the connection go."""
        if not self._released:
            self._released = True
            self._pool.give_back(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class UpstreamClient:
    """Keep-alive connections to every replica, shared by all requests of this process."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._pool = ConnectionPool(connect_timeout_s)

    async def open(self, url: str, body: Pieces, headers: Mapping[str, str]) -> UpstreamResponse:
        """POST `body` and return at the response's headers. Raises `Unreachable` or `Dropped`."""
        length = f"content-length: {sum(map(len, body))}\r\n"
        return await self._exchange("POST", url, headers, length, body)

    async def get_json(self, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, Any]:
        """GET a small document: (status, its JSON, or None where it is none). Raises `UpstreamFailed`."""
        status, body = await self.get(url, headers, timeout_s)
        return status, _document(body)

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """GET a small document: (status, its bytes). Raises `UpstreamFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                async with await self._exchange("GET", url, headers) as response:
                    return response.status, await response.body(_MAX_DOCUMENT_BYTES)
        except TimeoutError as error:
            raise Dropped("no answer in time") from error

    async def post_json(
        self, url: str, document: object, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Any]:
        """POST a small document: (status, the answer's JSON, or None). Raises `UpstreamFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                async with await self.open(url, (msgspec.json.encode(document),), headers) as response:
                    return response.status, _document(await response.body(_MAX_DOCUMENT_BYTES))
        except TimeoutError as error:
            raise Dropped("no answer in time") from error

    async def abort(self, replica_url: str, request_ids: Sequence[str], headers: Mapping[str, str]) -> bool:
        """End running or queued calls by id; False where the replica does not offer it."""
        body = msgspec.json.encode({"request_ids": list(request_ids)})
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                async with await self.open(replica_url + _ABORT_PATH, (body,), headers) as response:
                    await response.body(_MAX_DOCUMENT_BYTES)
                    return response.status == 200
        except (UpstreamFailed, TimeoutError):
            return False

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()

    async def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], length: str = "", body: Pieces = ()
    ) -> UpstreamResponse:
        target = _target(url)
        head = _head(method, target, headers, length)
        try:
            connection = await self._pool.take(target.origin)
        except TimeoutError as error:
            raise ConnectTimedOut(type(error).__name__) from error
        except OSError as error:
            raise Unreachable(type(error).__name__) from error
        kept = connection.since > 0  # from an earlier exchange, so that its other end may just have closed it
        try:
            await connection.ask(head, body)
        except BaseException as error:
            self._pool.give_back(connection)
            if not isinstance(error, ConnectionError):
                raise
            if kept and method == "GET":
                return await self._exchange(method, url, headers, length, body)
            raise Dropped(str(error)) from error
        return UpstreamResponse(connection, self._pool)


def _document(body: bytes) -> Any:
    """A body's JSON, None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class _Target(NamedTuple):
    """A URL as a request needs it: where to connect, what stands after the method."""

    origin: Origin
    line: str


@lru_cache(1024)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Target(
        Origin(host, port, parts.scheme == "https"),
        f"{path} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: */*\r\n",
    )


def _head(method: str, target: _Target, headers: Mapping[str, str], length: str) -> bytes:
    """A request's head. Raises ValueError where a header's value would begin another one."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header holds a line break")
    return f"{method} {target.line}{lines}{length}\r\n".encode()
