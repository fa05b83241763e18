"""The mock upstream without a C compiler: `mock.c` as an asyncio protocol, for machines that lack one.

usage: python -m tests.bench.mock_py --port N [--pace-ms N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from typing import Final

CHUNKS: Final = 64
CARRY: Final = 63
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')
_LENGTH: Final = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked", re.IGNORECASE)
_PACE: Final = re.compile(rb"\r\nx-mock-pace-ms:\s*(\d+)", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)
_CONTINUE: Final = re.compile(rb"\r\nexpect:\s*100-continue", re.IGNORECASE)
_WORDS: Final = ("The ", "parser ", "reads ", "one ", "line ", "and ", "returns ", "it. ")
_SENTENCE: Final = "The parser reads one line and returns it, so the caller can stop at the first error."


class Settings:
    """What control requests change, and counters."""

    def __init__(self, pace_ms: int) -> None:
        self.pace_ms = pace_ms
        self.serial = 0


class Mock(asyncio.Protocol):
    """One connection. Bodies are scanned as they come and not kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head = b""
        self._left = 0  # of the body or of the current chunk
        self._chunked = False
        self._body_bytes = 0
        self._tail = b""
        self._stream = self._usage = False
        self._reply: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reply:
            self._reply.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._reply and self._step():
            pass

    def _step(self) -> bool:
        """Read on; False when more bytes are needed."""
        if not self._head:
            return self._read_head()
        if self._chunked and self._left == 0:
            return self._read_chunk_size()
        if self._left < 0:
            return self._read_chunk_end()
        taken = bytes(self._buffer[: self._left])
        if not taken and self._left:
            return False
        del self._buffer[: len(taken)]
        self._left -= len(taken)
        self._scan(taken)
        if self._left == 0 and self._chunked:
            self._left = -1  # the line end after a chunk is due
        elif self._left == 0:
            self._answer()
        return bool(self._buffer)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = bytes(self._buffer[: end + 4])
        del self._buffer[: end + 4]
        length = _LENGTH.search(self._head)
        self._chunked = _CHUNKED.search(self._head) is not None
        self._left = int(length[1]) if length and not self._chunked else 0
        self._body_bytes, self._tail, self._stream, self._usage = 0, b"", False, False
        if _CONTINUE.search(self._head):
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._chunked and self._left == 0:
            self._answer()
        return True

    def _read_chunk_size(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
        if size == 0 and len(self._buffer) < end + 4:
            return False
        del self._buffer[: end + (4 if size == 0 else 2)]
        self._left = size
        if size == 0:
            self._answer()
        return True

    def _read_chunk_end(self) -> bool:
        if len(self._buffer) < 2:
            return False
        del self._buffer[:2]
        self._left = 0
        return True

    def _scan(self, data: bytes) -> None:
        self._body_bytes += len(data)
        text = self._tail + data
        self._stream = self._stream or _STREAM.search(text) is not None
        self._usage = self._usage or _USAGE.search(text) is not None
        self._tail = text[-CARRY:]

    def _write(self, data: bytes) -> None:
        if self._transport:
            self._transport.write(data)

    # ---- answers

    def _answer(self) -> None:
        method_path = self._head.split(b" ", 2)[:2]
        path = method_path[1].decode()
        if method_path[0] == b"POST" and path == "/v1/chat/completions":
            self._chat()
        elif path.startswith("/mock/pace?ms="):
            self._settings.pace_ms = int(path.partition("=")[2])
            self._json(200, {"pace_ms": self._settings.pace_ms})
        elif path == "/v1/models":
            model = {"id": "mock", "object": "model", "max_model_len": 1048576}
            self._json(200, {"object": "list", "data": [model]})
        elif path in ("/health", "/metrics", "/inference/v1/abort_requests"):
            self._json(200, None)
        else:
            self._json(404, {"detail": "Not Found"})

    def _json(self, status: int, value: object) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)
        self._end()

    def _end(self) -> None:
        if _CLOSE.search(self._head) and self._transport:
            self._transport.close()
        self._head = b""

    def _chat(self) -> None:
        self._settings.serial += 1
        identity = {"id": f"chatcmpl-mock{self._settings.serial:010}", "created": 1790000000, "model": "mock"}
        if not self._stream:
            message = {"role": "assistant", "content": _SENTENCE}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"object": "chat.completion", "choices": [choice], "usage": self._usage_record()}
            self._json(200, identity | answer)
            return
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        own = _PACE.search(self._head)
        pace_ms = int(own[1]) if own else self._settings.pace_ms
        identity["object"] = "chat.completion.chunk"
        if pace_ms:
            self._reply = asyncio.get_running_loop().create_task(self._paced(identity, pace_ms))
            return
        for number in range(CHUNKS):
            self._chunk(identity, number, _WORDS[number % 8])
        self._finish_stream(identity)

    async def _paced(self, identity: dict[str, object], pace_ms: int) -> None:
        loop, step = asyncio.get_running_loop(), pace_ms / 1000
        due = (loop.time() // step + 1) * step
        for number in range(CHUNKS):
            if number:
                await asyncio.sleep(due - loop.time())
                due += step
            self._chunk(identity, number, f"@t={time.monotonic_ns()} ")
        self._reply = None
        self._finish_stream(identity)

    def _chunk(self, identity: dict[str, object], number: int, word: str) -> None:
        delta = {"content": word} if number else {"role": "assistant", "content": ""}
        reason = "stop" if number == CHUNKS - 1 else None
        self._event(identity | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    def _finish_stream(self, identity: dict[str, object]) -> None:
        if self._usage:
            self._event(identity | {"choices": [], "usage": self._usage_record()})
        self._frame(b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")
        self._end()

    def _event(self, value: object) -> None:
        self._frame(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    def _frame(self, payload: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def _usage_record(self) -> dict[str, object]:
        prompt = self._body_bytes // 4 + 1
        cached = (prompt - 160) // 16 * 16 if prompt > 160 else 0
        record: dict[str, object] = {"prompt_tokens": prompt, "total_tokens": prompt + CHUNKS}
        return record | {"completion_tokens": CHUNKS, "prompt_tokens_details": {"cached_tokens": cached}}


async def serve(port: int, pace_ms: int) -> None:
    """Until cancelled."""
    settings = Settings(pace_ms)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Mock(settings), "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="the mock upstream in Python")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace-ms", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.pace_ms))


if __name__ == "__main__":
    main()
