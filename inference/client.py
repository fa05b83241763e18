"""The HTTP client towards the replicas (aiohttp).

    open() ── sends one request, returns at the response's headers
      Unreachable   no connection; nothing was sent
      Dropped       the connection broke after the request went out, before any answer
    UpstreamResponse.next_chunk() ── the body as it arrives
      Dropped       the connection broke inside the answer
    abort() ── ends a call by its id, so that its usage can still be read

Redirects are not followed, cookies not kept, bodies not decompressed. Idle connections are closed
before vLLM's own 5 s keep-alive ends, or a request could meet a connection that the engine is just
closing.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec

from ctxgate.inference.connections import READ_BUFFER, Calls, Connector
from ctxgate.inference.engine_load import LOAD_HEADER, of_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.inference.engine_load import EngineLoad
    from ctxgate.inference.wire import Pieces

_MAX_DOCUMENT_BYTES: Final = 2**24
_BUSY: Final = frozenset({429, 500, 502, 503, 504})  # it may answer otherwise the next time
_ABORT_PATH: Final = "/inference/v1/abort_requests"
_ABORT_TIMEOUT_S: Final = 5.0
_ERRORS: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)


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

    __slots__ = ("_broken", "_close", "_content", "_headers", "raw_content_type", "status")

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        content: aiohttp.StreamReader,
        close: Callable[[], None],
    ) -> None:
        self._headers = headers
        self._content = content
        self._close = close
        self._broken: Exception | None = None
        self.status: int = status
        self.raw_content_type: bytes = _header(headers, "content-type", "application/json")

    @property
    def is_json(self) -> bool:
        """Whether the body is JSON."""
        return self.raw_content_type.partition(b";")[0].strip().lower().endswith(b"json")

    @property
    def metadata(self) -> bytes:
        """vLLM's `metadata` header, which describes an answer of raw bytes; empty without one."""
        return _header(self._headers, "metadata", "")

    @property
    def load(self) -> EngineLoad | None:
        """What the engine tells of its load beside the answer, None where it tells nothing."""
        value = self._headers.get(LOAD_HEADER)
        return None if value is None else of_header(value)

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.raw_content_type.startswith(b"text/event-stream")

    async def next_chunk(self) -> bytes:
        """The bytes that have arrived since the last call; none at the end. Raises `Dropped`.

        What arrived before a connection broke is given before the error is raised.
        """
        if self._broken is not None:
            raise Dropped(type(self._broken).__name__) from self._broken
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            self._broken = error
            return _unread(self._content) or await self.next_chunk()

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
        if self._content.at_eof():
            return
        with suppress(Dropped, TimeoutError):
            async with asyncio.timeout(seconds):
                while await self.next_chunk():
                    pass

    def close(self) -> None:
        """The exchange is over. After half an answer the engine ends the call: it sees the connection go."""
        self._close()  # a body read to its end has given its connection back already

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _header(headers: Mapping[str, str], name: str, absent: str) -> bytes:
    """A header in the bytes it came in; of a repeated one the first."""
    return headers.get(name, absent).encode("utf-8", "surrogateescape")


def _unread(content: aiohttp.StreamReader) -> bytes:
    """What had arrived before a connection broke; aiohttp raises the error first and keeps it to itself."""
    content.set_exception(None)  # type: ignore[arg-type] # the only way past it to the buffer
    return content.read_nowait()


class UpstreamClient:
    """Keep-alive connections to every replica, shared by all requests of this process.

    `connect_timeout_s` covers a host's name, its connection and TLS.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=Connector(),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            skip_auto_headers=("user-agent", "accept-encoding"),
        )
        self._calls = Calls(self._session, timeout)

    @property
    def ready(self) -> bool:
        """Whether calls go out at once: here always."""
        return True

    async def open(self, url: str, body: Pieces, headers: Mapping[str, str]) -> UpstreamResponse:
        """POST `body` and return at the response's headers. Raises `Unreachable` or `Dropped`."""
        try:
            message, content, connection = await self._calls.post(url, body, headers)
        except _ERRORS as error:
            raise _failure(error) from error
        return UpstreamResponse(message.code, message.headers, content, connection.close)

    async def get_json(self, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, Any]:
        """GET a small document: (status, its JSON, or None where it is none). Raises `UpstreamFailed`."""
        status, body = await self.get(url, headers, timeout_s)
        return status, _document(body)

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """GET a small document: (status, its bytes). Raises `UpstreamFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                async with await self._asked(url, headers) as response:
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

    async def abort(
        self, replica_url: str, request_ids: Sequence[str], headers: Mapping[str, str]
    ) -> bool | None:
        """End running or queued calls by id.

        False where the replica does not offer it, None where it gave no answer, as a busy one may.
        """
        document = {"request_ids": list(request_ids)}
        try:
            status, _ = await self.post_json(replica_url + _ABORT_PATH, document, headers, _ABORT_TIMEOUT_S)
        except UpstreamFailed:
            return None
        return None if status in _BUSY else status == 200

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await asyncio.sleep(0)  # let the transports' close callbacks run

    async def _asked(self, url: str, headers: Mapping[str, str]) -> UpstreamResponse:
        try:
            response = await self._session.get(url, headers=headers, allow_redirects=False)
        except _ERRORS as error:
            raise _failure(error) from error
        return UpstreamResponse(response.status, response.headers, response.content, response.close)


def _failure(error: Exception) -> UpstreamFailed:
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unreachable(type(error).__name__)
    if isinstance(error, TimeoutError):  # only connecting has a limit here
        return ConnectTimedOut(type(error).__name__)
    return Dropped(type(error).__name__)


def _document(body: bytes) -> Any:
    """A body's JSON, None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
