"""How an answer was cut into reads never shows, nor when it was read."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.http_connection import Connection, Origin

SIZES = st.lists(st.integers(1, 40), max_size=6)


def chunked(sizes: list[int]) -> tuple[bytes, bytes]:
    """A chunked body on the wire, and its contents."""
    pieces = [bytes([97 + at % 26]) * size for at, size in enumerate(sizes)]
    wire = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return wire + b"0\r\n\r\n", b"".join(pieces)


class _Silent:
    def write(self, _: bytes) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def read(wire: bytes, cuts: list[int], *, eager: bool, closes: bool) -> tuple[object, ...]:
    """All that a reader sees of an answer that comes in parts; `eager`: it reads between the parts."""
    connection = Connection(Origin("h", 1, tls=False), lambda _: None)
    connection.connection_made(cast("asyncio.Transport", _Silent()))
    asking = asyncio.create_task(connection.ask(b"", ()))
    await asyncio.sleep(0)
    edges = [0, *sorted({cut % (len(wire) + 1) for cut in cuts} - {0, len(wire)}), len(wire)]
    parts: list[bytes] = []

    async def take_all() -> None:
        await asking
        while part := await connection.next_part():
            parts.append(part)

    taking = asyncio.create_task(take_all()) if eager else None
    for start, end in pairwise(edges):
        connection.data_received(wire[start:end])
        if eager:
            await asyncio.sleep(0)
    if closes:
        connection.connection_lost(None)
    await (taking or take_all())
    return connection.status, connection.headers, b"".join(parts), connection.reusable


@given(
    sizes=SIZES,
    framing=st.sampled_from(["chunked", "length", "close"]),
    interim=st.booleans(),
    cuts=st.lists(st.integers(0, 2000), max_size=30),
    eager=st.booleans(),
)
def test_cuts_never_show(sizes: list[int], framing: str, interim: bool, cuts: list[int], eager: bool) -> None:
    wire, body = chunked(sizes)
    head = {
        "chunked": b"transfer-encoding: chunked\r\n",
        "length": b"Content-Length: %d\r\n" % len(body),
        "close": b"",
    }[framing]
    before = b"HTTP/1.1 103 Early\r\nx-early: 1\r\n\r\n" if interim else b""
    sent = before + b"HTTP/1.1 201 Made\r\nX-Name: v\r\n" + head + b"\r\n"
    sent += wire if framing == "chunked" else body
    closes = framing == "close"
    status, headers, got, reusable = asyncio.run(read(sent, cuts, eager=eager, closes=closes))
    expected = {b"x-name": b"v"}
    if head:
        name, _, value = head.strip().partition(b": ")
        expected[name.lower()] = value
    assert (status, headers, got, reusable) == (201, expected, body, not closes)
