"""The load generator without a C compiler: the options and the answer of `load.c`, on asyncio streams.

usage: see load.c
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.bodies import CLIENT_MARK, CONVERSATION_MARK, REQUEST_MARK, TURN_MARK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNKS: Final = 64
MAX_ERRORS: Final = 100
MAX_CLIENTS: Final = 4096
_NONCES: Final = {CLIENT_MARK.encode(): b"c", CONVERSATION_MARK.encode(): b"t", REQUEST_MARK.encode(): b"r"}
_STAMP: Final = re.compile(rb'"@t=(\d+) ')


class Turns:
    """The bodies of a connection's requests, made from a template as load.c describes it."""

    def __init__(self, template: bytes, run: int) -> None:
        self._run = run
        *turns, tail = template.split(TURN_MARK.encode())
        self._pieces: list[bytes] = []
        self._ends: list[int] = []  # number of pieces before the end of each turn
        for text in turns or [tail]:
            self._pieces += _cut(text)
            self._ends.append(len(self._pieces))
        self._tail = _cut(tail) if turns else []

    def body(self, client: int, request: int) -> bytes:
        """Of the connection `client`, its request of that number; both count from 0."""
        conversation, turn = divmod(client + request, len(self._ends))
        marks = zip(_NONCES.items(), ((0, 0), (self._run, conversation), (self._run, request)), strict=True)
        nonces = {
            mark: b"%s%06x%03x%06x" % (letter, run & 0xFFFFFF, client, number & 0xFFFFFF)
            for (mark, letter), (run, number) in marks
        }
        pieces = (*self._pieces[: self._ends[turn]], *self._tail)
        return b"".join([nonces.get(piece, piece) for piece in pieces])


def _cut(text: bytes) -> list[bytes]:
    """At the marks of nonces, which are pieces of their own."""
    return re.split(b"(" + b"|".join(_NONCES) + b")", text)


class Run:
    """What all connections share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.turns = Turns(Path(args.body).read_bytes(), args.run)
        self.began = time.monotonic()
        self.started = self.done = self.errors = 0
        self.error_samples: list[str] = []
        self.ttfb: list[float] = []
        self.ttlb: list[float] = []
        self.gaps: list[float] = []
        self.delays: list[float] = []

    def more(self) -> bool:
        if self.errors >= MAX_ERRORS or (self.args.requests and self.started >= self.args.requests):
            return False
        return time.monotonic() - self.began < float(self.args.seconds)

    async def client(self, number: int) -> None:
        """One connection: requests one after another."""
        begun = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", self.args.port)
        while self.more():
            self.started += 1
            body = self.turns.body(number, begun)
            begun += 1
            problem = ""
            try:
                async with asyncio.timeout(float(self.args.timeout)):
                    problem = await self._exchange(reader, writer, body)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                problem = repr(error)
            self.done += 1
            if problem:
                self.errors += 1
                self.error_samples = [*self.error_samples, problem][:5]
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.args.port)
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> str:
        headers = ["content-type: application/json", "accept: */*", *self.args.header]
        headers.append(f"content-length: {len(body)}")
        head = "\r\n".join([f"POST {self.args.path} HTTP/1.1", f"host: 127.0.0.1:{self.args.port}", *headers])
        started = time.monotonic_ns()
        writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        first = 0
        pieces: list[bytes] = []
        stamps: list[tuple[int, int]] = []
        async for piece in _pieces(reader, answer):
            now = time.monotonic_ns()
            first = first or now
            pieces.append(piece)
            stamps.extend((int(stamp), now) for stamp in _STAMP.findall(piece))
        ended = time.monotonic_ns()
        if problem := self._problem(answer, b"".join(pieces)):
            return problem
        self.ttfb.append((first - started) / 1000)
        self.ttlb.append((ended - started) / 1000)
        self.delays.extend((read - wrote) / 1000 for wrote, read in stamps)
        self.gaps.extend((b[1] - a[1]) / 1000 for a, b in pairwise(stamps))
        return ""

    def _problem(self, head: bytes, body: bytes) -> str:
        status = head.split(b" ", 2)[1].decode()
        if status != "200":
            return f"status (status {status})"
        if not self.args.stream:
            return "" if b'"usage"' in body else "the answer lacks its end"
        chunks = body.count(b'"delta"')
        if b"[DONE]" not in body:
            return "the answer lacks its end"
        right = chunks >= CHUNKS if self.args.reshaped else chunks == CHUNKS
        return "" if right else f"{chunks} chunks"

    def result(self) -> dict[str, object]:
        times = os.times()
        return {
            "requests": self.done,
            "errors": self.errors,
            "seconds": time.monotonic() - self.began,
            "cpu_s": times.user + times.system,
            "error_samples": self.error_samples,
            "ttfb_us": self.ttfb,
            "ttlb_us": self.ttlb,
            "gap_us": self.gaps,
            "delay_us": self.delays,
        }


async def _pieces(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """The body's bytes as they come; `head` in lower case."""
    if b"transfer-encoding: chunked" in head:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head)
    left = int(length[1]) if length else 0
    while left:
        piece = await reader.read(min(left, 65536))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece


async def run(args: argparse.Namespace) -> dict[str, object]:
    """The answer of the load generator."""
    shared = Run(args)
    async with asyncio.TaskGroup() as group:
        for number in range(args.clients):
            group.create_task(shared.client(number))
    return shared.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="the load generator in Python")
    for name, kind, default in (
        ("port", int, None),
        ("body", str, None),
        ("clients", int, 1),
        ("requests", int, 0),
        ("seconds", float, 3600.0),
        ("stream", int, 0),
        ("reshaped", int, 0),
        ("timeout", float, 120.0),
        ("run", int, os.getpid()),
        ("path", str, "/v1/chat/completions"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, required=default is None)
    parser.add_argument("--header", action="append", default=[])
    args = parser.parse_args()
    if not 1 <= args.clients <= MAX_CLIENTS:
        parser.error(f"clients: 1 to {MAX_CLIENTS}")
    print(json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
