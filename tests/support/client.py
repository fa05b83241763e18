"""A small HTTP/1.1 client that shows the bytes: heads, single chunks, and how a connection ends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

WAIT_S: Final = 10.0
CHAT: Final = "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """A whole answer. `clean`: its body ended as its headers promised."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    clean: bool = True
    chunks: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> str:
        """A header's value, "" when it is absent."""
        return dict(self.headers).get(name, "")

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer in OpenAI's envelope, which must have all its members."""
        assert self.header("content-type") == "application/json"
        error = self.document["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[bytes]:
        """The payloads of a stream's events."""
        return [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]

    @property
    def documents(self) -> list[Any]:
        """The events of a stream as JSON, its end marker left out."""
        return [json.loads(event) for event in self.events if event != b"[DONE]"]


class Wire:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Self:
        """Open a connection; a small receive buffer makes a slow reader felt soon."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = 2**20 if receive_buffer is None else 1024
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)

    def request(
        self,
        path: str = CHAT,
        body: bytes | dict[str, Any] | None = None,
        headers: Iterable[tuple[str, str]] = (),
        method: str | None = None,
    ) -> None:
        """One request; a given body makes it a POST."""
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [f"{method or ('GET' if raw is None else 'POST')} {path} HTTP/1.1", "host: gateway"]
        lines += [f"{name}: {value}" for name, value in headers]
        if raw is not None and not any(name.lower() == "transfer-encoding" for name, _ in headers):
            lines.append(f"content-length: {len(raw)}")
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (raw or b""))

    async def head(self) -> Answer:
        """The status and headers of the next answer."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = []
        for line in lines:
            name, _, value = line.partition(":")
            headers.append((name.lower(), value.strip()))
        return Answer(int(first.split(" ")[1]), headers)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" at its end. Raises IncompleteReadError when it is cut."""
        size = int((await asyncio.wait_for(self.reader.readline(), WAIT_S)).strip() or b"x", 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), WAIT_S)
        return data[:-2]

    async def rest(self, answer: Answer, *, head_only: bool = False) -> Answer:
        """Read the body of an answer whose head was read."""
        try:
            if head_only:
                return answer
            if answer.header("transfer-encoding") == "chunked":
                while chunk := await self.chunk():
                    answer.chunks.append(chunk)
                answer.body += b"".join(answer.chunks)
            else:
                length = int(answer.header("content-length") or "0")
                answer.body = await asyncio.wait_for(self.reader.readexactly(length), WAIT_S)
        except (asyncio.IncompleteReadError, ValueError):
            answer.clean = False
            answer.body += b"".join(answer.chunks)
        return answer

    async def answer(self, *, head_only: bool = False) -> Answer:
        """The next whole answer."""
        return await self.rest(await self.head(), head_only=head_only)

    async def closed(self) -> bool:
        """Wait for the gateway to close the connection; whether nothing more came."""
        return await asyncio.wait_for(self.reader.read(), WAIT_S) == b""

    def reset(self) -> None:
        """Leave with a RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


@asynccontextmanager
async def connected(port: int, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    """A connection that is closed in the end."""
    wire = await Wire.connect(port, receive_buffer)
    try:
        yield wire
    finally:
        await wire.close()
