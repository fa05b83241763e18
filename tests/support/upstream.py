"""A scripted upstream on a random loopback port: what a vLLM server can do, and what can happen to one.

Each metered request is an `Exchange`. It is played by the next scripted behaviour, else by the default
one; a test that scripts `by_hand` gets the exchange and plays it itself, so that every step of a
stream waits for the test and for no clock. Everything received is recorded byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Behaviour: TypeAlias = "Callable[[Exchange], Awaitable[None]]"

ABORT_PATH: Final = "/inference/v1/abort_requests"
METERED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
REASONS: Final = {200: "OK", 204: "No Content", 302: "Found", 400: "Bad Request", 404: "Not Found"}


def usage(prompt: int = 40, cached: int | None = 32, completion: int = 3) -> dict[str, Any]:
    """A usage object in vLLM's shape; without `cached` its details are null."""
    details = None if cached is None else {"cached_tokens": cached, "created_cache_tokens": 0}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


class Exchange:
    """One metered request and the answer to it.

    `aborted`: its id was named in an abort call; `closed`: the gateway closed the connection before the
    answer was whole.
    """

    def __init__(self, upstream: Upstream, connection: Connection, head: Head, body: bytes) -> None:
        self.upstream = upstream
        self.connection = connection
        self.method, self.path, self.headers = head.method, head.path, head.headers
        self.raw_head = head.raw
        self.body = body
        self.aborted = asyncio.Event()
        self.closed = asyncio.Event()
        self.finished = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id the gateway gave the call."""
        return self.header("x-request-id")

    @property
    def engine_id(self) -> str:
        """The id under which vLLM knows the call."""
        if self.path == "/v1/chat/completions":
            return f"chatcmpl-{self.request_id}"
        return f"cmpl-{self.request_id}-0"

    @property
    def document(self) -> dict[str, Any]:
        """The body as JSON."""
        return cast("dict[str, Any]", json.loads(self.body.decode("utf-8", "replace")))

    def header(self, name: str) -> str:
        """A header's value, "" when it is absent."""
        return dict(self.headers).get(name, "")

    @property
    def streams(self) -> bool:
        """Whether the request asks for a stream."""
        return self.document.get("stream") is True

    def write(self, data: bytes) -> None:
        """Bytes on the wire, as they are."""
        self.connection.transport.write(data)

    def head(self, status: int = 200, content_type: str = EVENT_STREAM, *more: str) -> None:
        """The headers of a chunked answer."""
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", f"content-type: {content_type}"]
        lines += ["transfer-encoding: chunked", *more]
        self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def piece(self, data: bytes) -> None:
        """One chunk of the body."""
        self.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, document: object) -> None:
        """One event."""
        self.piece(event_bytes(document))

    def chunk(self, delta: Mapping[str, Any], reason: str | None = None, index: int = 0, **more: Any) -> None:
        """A chunk with one choice, in the shape of the request's surface."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if self.path == "/v1/completions":
            choice["text"] = delta.get("content", "")
        else:
            choice["delta"] = dict(delta)
        self.event(self.shell([choice]) | more)

    def shell(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around its choices."""
        chat = self.path == "/v1/chat/completions"
        return {
            "id": f"chatcmpl-{self.request_id}" if chat else f"cmpl-{self.request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1796040000,
            "model": self.document["model"],
            "choices": choices,
        }

    def text(self, text: str) -> None:
        """A chunk of the model's text."""
        self.chunk({"content": text})

    def usage_chunk(self, **figures: Any) -> None:
        """The usage-only chunk, where the request asked for usage."""
        if (self.document.get("stream_options") or {}).get("include_usage"):
            self.event(self.shell([]) | {"usage": usage(**figures)})

    def done(self) -> None:
        """The end marker and the last chunk."""
        self.piece(b"data: [DONE]\n\n")
        self.end()

    def end(self) -> None:
        """The end of a chunked body."""
        self.write(b"0\r\n\r\n")
        self.finish()

    def respond(self, status: int, body: bytes, content_type: str = "application/json", *more: str) -> None:
        """A whole answer."""
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", f"content-type: {content_type}"]
        lines += [f"content-length: {len(body)}", *more]
        self.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        self.finish()

    def answer(self, reason: str = "stop", text: str = "a b c ", **figures: Any) -> None:
        """A whole JSON answer."""
        self.respond(200, json.dumps(self.answer_document(reason, text, **figures)).encode())

    def answer_document(self, reason: str = "stop", text: str = "a b c ", **figures: Any) -> dict[str, Any]:
        """What `answer` sends."""
        if self.path == "/v1/embeddings":
            embedding = {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}
            counts = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
            return {"object": "list", "model": "m", "data": [embedding], "usage": counts}
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.path == "/v1/completions":
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text}
        return self.shell([choice]) | {"usage": usage(**figures)}

    def reset(self) -> None:
        """Cut the connection with a reset."""
        self.connection.reset()
        self.finish()

    def hang_up(self) -> None:
        """Close the connection without ending the body."""
        self.connection.transport.close()
        self.finish()

    def finish(self) -> None:
        """The answer is over; the connection may carry the next request."""
        self.finished.set()
        self.connection.next_request()

    async def until_left(self) -> None:
        """Wait until the gateway aborts the call or closes its connection."""
        waits = [asyncio.ensure_future(self.aborted.wait()), asyncio.ensure_future(self.closed.wait())]
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    def end_aborted(self, completion: int = 1, cached: int = 32) -> None:
        """The end of a stream whose call was aborted, as vLLM gives it."""
        if completion:
            self.chunk({"content": ""}, "abort")
        self.usage_chunk(completion=completion, cached=cached)
        self.done()


def event_bytes(document: object) -> bytes:
    """A document as one server-sent event."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


class Head:
    """The head of a request."""

    def __init__(self, raw: bytes) -> None:
        first, *lines = raw.decode("latin-1").split("\r\n")
        self.raw = raw
        self.method, self.path, _ = first.split(" ")
        self.headers: list[tuple[str, str]] = []
        for line in lines:
            name, _, value = line.partition(":")
            self.headers.append((name.lower(), value.strip()))

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return int(dict(self.headers).get("content-length", "0"))


class Connection(asyncio.Protocol):
    """One connection from the gateway."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.exchange: Exchange | None = None
        self.served = 0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.upstream.accepted += 1
        self.upstream.open.add(self)
        if self.upstream.reset_on_accept:
            self.upstream.reset_on_accept -= 1
            self.reset()

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.open.discard(self)
        if self.exchange is not None and not self.exchange.finished.is_set():
            self.exchange.closed.set()

    def data_received(self, data: bytes) -> None:
        if self.upstream.reset_on_next_request and self.served and data.startswith(b"POST /v1/"):
            self.upstream.reset_on_next_request = False
            self.reset()
            return
        self._buffer += data
        self.next_request()

    def next_request(self) -> None:
        """Take the next request if it is whole and the one before is answered."""
        if self.exchange is not None and not self.exchange.finished.is_set():
            return
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = Head(self._buffer[:head_end])
        end = head_end + 4 + head.length
        if len(self._buffer) < end:
            return
        body, self._buffer = self._buffer[head_end + 4 : end], self._buffer[end:]
        self.served += 1
        self.exchange = Exchange(self.upstream, self, head, body)
        self.upstream.take(self.exchange)

    def reset(self) -> None:
        """Close with a RST."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Upstream:
    """The server. `calls` holds the metered requests in the order of their coming."""

    def __init__(self) -> None:
        self.calls: list[Exchange] = []
        self.script: deque[Behaviour] = deque()
        self.default: Behaviour = ok
        self.abort_status = 200
        self.aborts_lost = 0  # so many abort calls get no answer
        self.abort_calls: list[list[str]] = []
        self.health_status = 200
        self.models: Any = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}
        self.metrics: bytes | None = None
        self.probes = 0
        self.accepted = 0
        self.open: set[Connection] = set()
        self.reset_on_accept = 0
        self.reset_on_next_request = False
        self._arrived: asyncio.Queue[Exchange] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a free port, or on the one it had before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything, at once."""
        assert self._server is not None
        self._server.close()
        for connection in list(self.open):
            connection.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def play(self, *behaviours: Behaviour) -> None:
        """Script the next metered requests."""
        self.script.extend(behaviours)

    async def next_call(self) -> Exchange:
        """The next request that is played by hand."""
        return await asyncio.wait_for(self._arrived.get(), 10)

    def take(self, exchange: Exchange) -> None:
        """Serve one request."""
        if exchange.path in METERED:
            self.calls.append(exchange)
            behaviour = self.script.popleft() if self.script else self.default
            if behaviour is by_hand:
                self._arrived.put_nowait(exchange)
                return
            task = asyncio.get_running_loop().create_task(self._play(behaviour, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif exchange.path == ABORT_PATH:
            self._abort(exchange)
        elif exchange.path == "/health":
            self.probes += 1
            exchange.respond(self.health_status, b"")
        elif exchange.path == "/v1/models":
            raw = self.models if isinstance(self.models, bytes) else json.dumps(self.models).encode()
            exchange.respond(200, raw)
        elif exchange.path == "/metrics" and self.metrics is not None:
            exchange.respond(200, self.metrics, "text/plain")
        else:
            exchange.respond(404, b'{"detail":"Not Found"}')

    async def _play(self, behaviour: Behaviour, exchange: Exchange) -> None:
        try:
            await behaviour(exchange)
        except Exception:
            exchange.reset()  # the test fails at once, not by a time limit
            raise

    def _abort(self, exchange: Exchange) -> None:
        ids = exchange.document["request_ids"]
        self.abort_calls.append(ids)
        if len(self.abort_calls) <= self.aborts_lost:
            exchange.reset()
            return
        if self.abort_status == 200:
            for call in self.calls:
                if call.engine_id in ids and not call.finished.is_set():
                    call.aborted.set()
        exchange.respond(self.abort_status, b"" if self.abort_status == 200 else b'{"detail":"no"}')


async def by_hand(exchange: Exchange) -> None:
    """Leave the exchange to the test; see `Upstream.next_call`."""
    raise AssertionError("handed to the test, never played")


async def ok(exchange: Exchange) -> None:
    """A whole answer: three chunks of text where a stream is asked for."""
    if exchange.streams:
        stream_of("a ", "b ", "c ")(exchange)
    else:
        exchange.answer()


def stream_of(*texts: str, reason: str = "stop") -> Callable[[Exchange], None]:
    """Writes a whole stream."""

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        for text in texts:
            exchange.text(text)
        exchange.chunk({}, reason)
        exchange.usage_chunk(completion=len(texts))
        exchange.done()

    return write
