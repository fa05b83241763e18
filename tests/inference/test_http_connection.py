"""One connection to a replica and the pool of them: framing, what is reused, and what ends a connection."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from ctxgate.inference import http_pool
from ctxgate.inference.client import ConnectTimedOut, Dropped, Unreachable, UpstreamClient
from ctxgate.inference.finding import Finding
from ctxgate.inference.http_connection import MAX_HEAD_BYTES, READ_BUFFER, Connection, Origin
from ctxgate.inference.probe import Probe, probe
from support import upstream as upstream_module
from support.behaviours import plays
from support.gateway import until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.upstream import Exchange, Upstream

PATH = "/v1/chat/completions"
BODY = (b'{"model":"m"}',)
CERTIFICATE = Path(__file__).with_name("localhost.pem")


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    """A client that is closed in the end."""
    one = UpstreamClient(connect_timeout_s=5.0)
    yield one
    await one.close()


def raw(data: bytes) -> Any:
    """A behaviour that writes an answer as it is, and goes on to the next request."""

    def write(exchange: Exchange) -> None:
        exchange.write(data)
        exchange.finish()

    return plays(write)


def then_close(data: bytes) -> Any:
    """A behaviour that writes and closes the connection properly."""

    def write(exchange: Exchange) -> None:
        exchange.write(data)
        exchange.hang_up()

    return plays(write)


async def answer(client: UpstreamClient, upstream: Upstream) -> tuple[int, bytes, bytes]:
    """Status, content type and body of one call."""
    async with await client.open(upstream.url + PATH, BODY, {}) as response:
        return response.status, response.raw_content_type, await response.body(2**20)


KEPT = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n1;a=b\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: content-type\r\n\r\n"
    b"2\r\nok\r\n0\r\ncontent-type: text/late\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\ncontent-type: text/early\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
]


@pytest.mark.parametrize("wire", KEPT)
async def test_a_whole_answer_keeps_its_connection(
    client: UpstreamClient, upstream: Upstream, wire: bytes
) -> None:
    upstream.play(raw(wire), raw(wire))
    assert await answer(client, upstream) == (200, b"application/json", b"ok")
    assert await answer(client, upstream) == (200, b"application/json", b"ok")
    assert upstream.accepted == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_needs_no_length(
    client: UpstreamClient, upstream: Upstream, status: int
) -> None:
    upstream.play(raw(b"HTTP/1.1 %d Empty\r\n\r\n" % status), raw(KEPT[0]))
    assert await answer(client, upstream) == (status, b"application/json", b"")
    assert await answer(client, upstream) == (200, b"application/json", b"ok")
    assert upstream.accepted == 1


LAST = [
    raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"),
    raw(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmore"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokay"),
    then_close(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\nok"),
    then_close(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nok"),
]


@pytest.mark.parametrize("behaviour", LAST)
async def test_a_connection_that_cannot_carry_more_is_not_reused(
    client: UpstreamClient, upstream: Upstream, behaviour: Any
) -> None:
    upstream.play(behaviour)
    assert (await answer(client, upstream))[2] == b"ok"
    assert (await answer(client, upstream))[0] == 200
    assert upstream.accepted == 2


BROKEN = [
    then_close(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"),
    then_close(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"),
    then_close(b"HTTP/1.1 200 OK\r\ncontent-le"),
    then_close(b""),
    raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES),
]


@pytest.mark.parametrize("behaviour", BROKEN)
async def test_half_an_answer_is_dropped(client: UpstreamClient, upstream: Upstream, behaviour: Any) -> None:
    upstream.play(behaviour)
    with pytest.raises(Dropped):
        await answer(client, upstream)
    await until(lambda: not upstream.open)


async def test_a_body_to_the_connections_end_that_is_reset_is_dropped(
    client: UpstreamClient, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    exchange.write(b"HTTP/1.1 200 OK\r\n\r\nok")
    async with await opening as response:
        assert await response.next_chunk() == b"ok"
        exchange.reset()
        with pytest.raises(Dropped):
            await response.next_chunk()


async def test_bytes_on_an_idle_connection_end_it(client: UpstreamClient, upstream: Upstream) -> None:
    await answer(client, upstream)
    (connection,) = upstream.open
    connection.transport.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    await until(lambda: not upstream.open)
    assert (await answer(client, upstream))[0] == 200


async def test_a_cancelled_call_is_hung_up_on(client: UpstreamClient, upstream: Upstream) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(exchange.closed.is_set)


async def test_closing_the_client_ends_a_call_that_runs(client: UpstreamClient, upstream: Upstream) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    exchange.head()
    response = await opening
    await client.close()
    with pytest.raises(Dropped):
        await response.next_chunk()
    response.close()
    await until(exchange.closed.is_set)


async def test_an_old_connection_is_closed_and_not_reused(
    client: UpstreamClient, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pool, "IDLE_CONNECTION_S", 0.0)
    await answer(client, upstream)
    await until(lambda: not upstream.open)  # by the pool's own timer
    await answer(client, upstream)
    await answer(client, upstream)
    assert upstream.accepted == 3


@pytest.mark.parametrize("value", ["a\nb", "a\r", "x\r\nx-request-id: forged"])
async def test_a_header_cannot_begin_another(client: UpstreamClient, upstream: Upstream, value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        await client.open(upstream.url + PATH, BODY, {"authorization": value})
    assert upstream.accepted == 0


async def test_a_host_that_does_not_answer_is_unreachable_and_silent(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(http_pool, "start_connection", never)
    client = UpstreamClient(connect_timeout_s=0.0)
    with pytest.raises(ConnectTimedOut):
        await client.open(upstream.url + PATH, BODY, {})
    assert await probe(client, upstream.url, {}, 5.0) == Probe(Finding.SILENT)


async def test_a_name_is_looked_up_and_one_that_stands_for_nothing_is_unreachable(
    client: UpstreamClient, upstream: Upstream
) -> None:
    url = f"http://localhost:{upstream.port}{PATH}"
    async with await client.open(url, BODY, {}) as response:
        assert response.status == 200
    assert upstream.calls[0].header("host") == f"localhost:{upstream.port}"
    with pytest.raises(Unreachable):
        await client.open(f"http://no-such-host.invalid{PATH}", BODY, {})


async def test_tls_is_spoken_with_those_whose_certificate_is_trusted(
    client: UpstreamClient, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    server = await asyncio.get_running_loop().create_server(
        lambda: upstream_module.Connection(upstream), "127.0.0.1", 0, ssl=context
    )
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}{PATH}"
    with pytest.raises(Unreachable):
        await client.open(url, BODY, {})
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    trusting = UpstreamClient(connect_timeout_s=5.0)
    for _ in range(2):
        upstream.play(raw(KEPT[0]))
        async with await trusting.open(url, (b"x" * 100_000,), {}) as response:
            assert response.status == 200
            assert await response.body(10) == b"ok"
    assert len(upstream.open) == 1
    await trusting.close()
    server.close()


# ---- flow control, without a socket -------------------------------------------------------------


class FakeTransport:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def write(self, _: bytes) -> None:
        """Take bytes."""

    def pause_reading(self) -> None:
        """Stop reading."""
        self.done.append("pause")

    def resume_reading(self) -> None:
        """Read again."""
        self.done.append("resume")

    def abort(self) -> None:
        """Close."""
        self.done.append("abort")


@pytest.fixture
async def asked() -> tuple[Connection, FakeTransport]:
    """A connection whose chunked answer has begun."""
    connection, transport = Connection(Origin("h", 1, tls=False), lambda _: None), FakeTransport()
    connection.connection_made(cast("asyncio.Transport", transport))
    asking = asyncio.create_task(connection.ask(b"", ()))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    await asking
    return connection, transport


async def test_a_reader_that_lags_holds_the_replica_up(asked: tuple[Connection, FakeTransport]) -> None:
    connection, transport = asked
    piece = b"%x\r\n" % 65_536 + b"x" * 65_536 + b"\r\n"
    for _ in range(READ_BUFFER // 65_536):
        connection.data_received(piece)
    assert transport.done == ["pause"]
    assert len(await connection.next_part()) == READ_BUFFER
    assert transport.done == ["pause", "resume"]


@pytest.mark.parametrize("endless", [b"1;" + b"e" * 1000, b"0\r\nt: " + b"t" * 1000])
async def test_framing_without_end_is_no_answer(
    asked: tuple[Connection, FakeTransport], endless: bytes
) -> None:
    connection, transport = asked
    connection.data_received(endless)
    while "abort" not in transport.done:
        connection.data_received(b"e" * 65_536)
    with pytest.raises(ConnectionError):
        await connection.next_part()


async def test_every_reading_of_the_end_is_the_same(asked: tuple[Connection, FakeTransport]) -> None:
    connection, _ = asked
    connection.data_received(b"2\r\nok\r\n0\r\n\r\n")
    assert [await connection.next_part() for _ in range(3)] == [b"ok", b"", b""]
    before = connection.reusable
    connection.connection_lost(None)
    assert (before, connection.reusable) == (True, False)
    with pytest.raises(ConnectionError):
        await connection.ask(b"", ())


async def test_the_loop_wakes_a_reader_once_per_arrival(asked: tuple[Connection, FakeTransport]) -> None:
    connection, _ = asked
    reading = asyncio.create_task(connection.next_part())
    await asyncio.sleep(0)
    arrivals: list[Callable[[], None]] = [
        lambda: connection.data_received(b"1\r\n"),
        lambda: connection.data_received(b"a"),
        lambda: connection.data_received(b"\r\n1\r\nb\r\n"),
    ]
    for arrive in arrivals:
        arrive()
    assert await reading == b"ab"
