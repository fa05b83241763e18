"""The ASGI side of a request: nothing behind it sees the socket.

Hot routes are raw ASGI (no body model, no middleware): one read of the body, one reply. Everything
else goes to the FastAPI application.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import zstandard

from ctxgate.gateway.errors import STOPPING, Kind, Refused, body_of, headers_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    Message: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]
    Headers: TypeAlias = list[tuple[bytes, bytes]]
    WhenLeft: TypeAlias = Callable[[Callable[[], None] | None], None]

JSON: Final = (b"content-type", b"application/json")
EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
WHEN_LEFT: Final = "ctxgate.when_left"  # the ASGI extension by which the server tells of a client's going
BODY_IS_WHOLE: Final = "ctxgate.body_is_whole"  # and the one by which it tells whether all of a body is there
BODY_IDLE_S: Final = 60.0  # a client that sends nothing of its body for so long has lost its turn
_INFLATE_STEP: Final = 2**20
_INFLATE_INPUT: Final = 2**16
_ZSTD_INPUT: Final = 2**8  # 64 blocks of 128 KiB at the very most


class ClientGone(Exception):
    """The client closed its connection before its request was whole."""


class Stopping:
    """Set once, when the gateway is to end: what it still reads then is not waited for."""

    __slots__ = ("_is_set", "reading")

    def __init__(self) -> None:
        self._is_set = False
        self.reading: set[asyncio.Timeout] = set()

    def is_set(self) -> bool:
        """Whether the gateway is ending."""
        return self._is_set

    def set(self) -> None:
        """End every wait for more of a body; idempotent."""
        self._is_set = True
        for wait in self.reading:
            if not wait.expired():
                wait.reschedule(0.0)


class Reply:
    """The answer to one client: headers once, then bytes, then the end; or nothing once it has gone.

    `gone` tells that the client closed its side before the answer was complete; from then on nothing
    is sent, and `on_gone` has been called once.
    """

    __slots__ = (
        "_receive",
        "_send",
        "_watcher",
        "_when_left",
        "ended",
        "gone",
        "on_gone",
        "started",
        "status",
        "streams",
    )

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._when_left: WhenLeft | None = None
        self.started = False
        self.streams = False  # the answer is events, of which more may come
        self.ended = False
        self.status = 0  # 0 until headers went out
        self.gone = False
        self.on_gone: Callable[[], None] | None = None

    def watch(self, when_left: WhenLeft | None = None) -> None:
        """Start to notice the client's going; call it after the body has been read.

        `when_left` is the server's own word of it, where it gives one; else a task waits for ASGI's.
        """
        self._when_left = when_left
        if when_left is not None:
            when_left(self._left)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        if not self.ended and not self.gone:
            self.gone = True
            if self.on_gone is not None:
                self.on_gone()

    def unwatch(self) -> None:
        """Stop noticing; idempotent."""
        if self._when_left is not None:
            self._when_left(None)
            self._when_left = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers."""
        self.started = True
        self.streams = EVENT_STREAM[0] in headers
        self.status = status
        if not self.gone:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body now."""
        if not self.gone:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the body."""
        if not self.gone and not self.ended:
            self.ended = True
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def refuse(self, refused: Refused, headers: Headers) -> None:
        """Send a refusal in OpenAI's envelope."""
        if refused.kind is Kind.REQUEST_TIMEOUT:
            headers = [*headers, (b"connection", b"close")]  # the rest of its body would be read as a request
        await self.whole(refused.status, [JSON, *headers, *headers_of(refused)], body_of(refused))


def read_headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header names to values, lower case. Raises `Refused` when a credential is given twice."""
    headers: dict[str, str] = {}
    for name_bytes, value in raw:
        name = name_bytes.decode("latin-1")
        if name in headers and name in ("authorization", "x-api-key", "api-key"):
            raise Refused(Kind.UNKNOWN_KEY, f"Header '{name}' is given more than once.")
        headers[name] = value.decode("latin-1")
    return headers


async def read_body(
    receive: Receive,
    headers: dict[str, str],
    limit: int,
    stopping: Stopping | None = None,
    is_whole: Callable[[], bool] | None = None,
) -> bytes:
    """The request body, decompressed, at most `limit` bytes. Raises `Refused` or `ClientGone`.

    Reading stops at the limit: an endless or exploding body costs no more than a valid one. It stops
    too when nothing comes for `BODY_IDLE_S`, and once `stopping` is set while more of it is awaited. A
    body that `is_whole`, by the server's word of it, needs no such watch: it is there.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", "deflate", "zstd"):
        message = "Content-Encoding must be gzip, zstd, deflate or identity."
        raise Refused(Kind.UNSUPPORTED_ENCODING, message, "content-encoding")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    if is_whole is not None and is_whole():
        body = _only(await receive(), limit)
    else:
        body = await _received_in_time(receive, limit, stopping or Stopping())
    if encoding == "identity":
        return body
    return await asyncio.to_thread(decompress, body, encoding, limit)


async def _received_in_time(receive: Receive, limit: int, stopping: Stopping) -> bytes:
    try:
        async with asyncio.timeout(0.0 if stopping.is_set() else BODY_IDLE_S) as idle:
            stopping.reading.add(idle)
            try:
                return await _received(receive, limit, idle, stopping)
            finally:
                stopping.reading.discard(idle)
    except TimeoutError as error:
        if stopping.is_set():
            raise STOPPING.fresh() from error
        message = f"Nothing of the request body came for {BODY_IDLE_S:g} seconds."
        raise Refused(Kind.REQUEST_TIMEOUT, message) from error


async def _received(receive: Receive, limit: int, idle: asyncio.Timeout, stopping: Stopping) -> bytes:
    message = await receive()
    if not message.get("more_body", False):
        return _only(message, limit)
    parts: list[bytes] = [message.get("body", b"")]
    size = len(parts[0])
    loop = asyncio.get_running_loop()
    while message.get("more_body", False) and size <= limit:
        if not stopping.is_set():
            idle.reschedule(loop.time() + BODY_IDLE_S)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _only(message: Message, limit: int) -> bytes:
    """The body of the only message that carries any."""
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if len(body) > limit:
        raise _too_large(limit)
    return body


def decompress(data: bytes, encoding: str, limit: int) -> bytes:
    """Undo a content encoding within `limit` bytes of output. Raises `Refused`."""
    parts: list[bytes] = []
    size = 0
    try:
        for part in _inflated(data, encoding):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        message = f"The request body is not valid {encoding}."
        raise Refused(Kind.INVALID_JSON, message, "content-encoding") from error
    return b"".join(parts)


def _inflated(data: bytes, encoding: str) -> Iterator[bytes]:
    """The content, piece by piece. A body is one stream or, but for deflate, several one after another."""
    inflater = _inflater(data, encoding)
    step = _ZSTD_INPUT if encoding == "zstd" else _INFLATE_INPUT
    for start in range(0, len(data), step):
        rest = data[start : start + step]
        while rest:
            if inflater.eof:
                if encoding == "deflate":
                    raise EOFError
                inflater = _inflater(rest, encoding)
            part, rest = inflater.step(rest)
            yield part
    yield inflater.flush()
    if not inflater.eof:
        raise EOFError


class _Zlib:
    """gzip, zlib and bare deflate, told apart by their first byte; a step gives at most _INFLATE_STEP."""

    def __init__(self, data: bytes, encoding: str) -> None:
        bare = encoding == "deflate" and data[:1] != b"\x78"
        self._stream = zlib.decompressobj(wbits=-15 if bare else 47)
        self.flush = self._stream.flush

    @property
    def eof(self) -> bool:
        return self._stream.eof

    def step(self, data: bytes) -> tuple[bytes, bytes]:
        part = self._stream.decompress(data, _INFLATE_STEP)
        return part, self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail


class _Zstd:
    """One zstd frame. Its decoder knows no bound on the output, so a step's input is kept short."""

    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
        self.flush = self._stream.flush

    @property
    def eof(self) -> bool:
        return self._stream.eof

    def step(self, data: bytes) -> tuple[bytes, bytes]:
        part = self._stream.decompress(data)
        return part, self._stream.unused_data if self._stream.eof else b""


def _inflater(data: bytes, encoding: str) -> _Zlib | _Zstd:
    return _Zstd() if encoding == "zstd" else _Zlib(data, encoding)


def _too_large(limit: int) -> Refused:
    return Refused(Kind.BODY_TOO_LARGE, f"The request body is larger than {limit} bytes.")
