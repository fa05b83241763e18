"""The client's connections to a replica: which answers are whole, what is reused, and what ends one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ctxgate.inference import client as client_module
from ctxgate.inference import connections
from ctxgate.inference.client import AnswerTooLarge, ConnectTimedOut, Dropped, Unreachable, UpstreamClient
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe, probe
from support.behaviours import plays
from support.gateway import until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.upstream import Exchange, Upstream

PATH = "/v1/chat/completions"
BODY = (b'{"model":"m"}',)
LONG_HEAD_BYTES = 2**16


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
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokay"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok"),
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * LONG_HEAD_BYTES),
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


async def test_a_body_whose_framing_breaks_while_it_is_read_is_dropped(
    client: UpstreamClient, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    exchange.head()
    exchange.piece(b"one")
    async with await opening as response, asyncio.timeout(5):  # else a reader forgotten would wait for ever
        assert await response.next_chunk() == b"one"
        exchange.write(b"not a size\r\n")
        with pytest.raises(Dropped):
            await response.next_chunk()


async def test_a_document_beyond_the_limit_is_refused(
    client: UpstreamClient, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.models = b'{"data":[]}'
    assert await client.get(upstream.url + "/v1/models", {}, 5.0) == (200, b'{"data":[]}')
    monkeypatch.setattr(client_module, "_MAX_DOCUMENT_BYTES", 10)  # one byte less than that
    with pytest.raises(AnswerTooLarge):
        await client.get_json(upstream.url + "/v1/models", {}, 5.0)


async def test_bytes_on_an_idle_connection_answer_nothing(client: UpstreamClient, upstream: Upstream) -> None:
    await answer(client, upstream)
    (connection,) = upstream.open
    connection.transport.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    for _ in range(5):
        await asyncio.sleep(0)  # they have arrived by now
    assert (await answer(client, upstream))[0] == 200
    assert upstream.accepted == 2


async def test_a_switch_of_protocols_is_the_last_of_its_connection(
    client: UpstreamClient, upstream: Upstream
) -> None:
    upstream.play(raw(b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"))
    assert (await answer(client, upstream))[0] == 101
    assert (await answer(client, upstream))[0] == 200
    assert upstream.accepted == 2


@pytest.mark.parametrize("kept", [False, True])
async def test_a_question_without_effects_is_asked_twice_at_most_and_a_call_once(
    client: UpstreamClient, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, *, kept: bool
) -> None:
    if kept:
        await answer(client, upstream)
    asked: list[str] = []

    def reset(exchange: Exchange) -> None:
        asked.append(exchange.method)
        exchange.reset()

    monkeypatch.setattr(upstream, "take", reset)
    with pytest.raises(Dropped):
        await answer(client, upstream)
    assert asked == ["POST"]
    with pytest.raises(Dropped):
        await client.get(upstream.url + "/health", {}, 5.0)
    assert asked == ["POST", "GET", "GET"]


async def test_a_cancelled_call_is_hung_up_on(client: UpstreamClient, upstream: Upstream) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(exchange.closed.is_set)


async def test_an_old_connection_is_closed_and_not_reused(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_CONNECTION_S", 1e-9)
    client = UpstreamClient(connect_timeout_s=5.0)
    await answer(client, upstream)
    await until(lambda: not upstream.open)  # by the pool's own timer
    await answer(client, upstream)
    await answer(client, upstream)
    assert upstream.accepted == 3
    await client.close()


@pytest.mark.parametrize("value", ["a\nb", "a\r", "x\r\nx-request-id: forged"])
async def test_a_header_cannot_begin_another(client: UpstreamClient, upstream: Upstream, value: str) -> None:
    with pytest.raises(ValueError, match="header"):
        await client.open(upstream.url + PATH, BODY, {"authorization": value})
    await until(lambda: not upstream.open)
    assert upstream.calls == []


async def test_a_host_that_does_not_answer_is_unreachable_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", never)
    client = UpstreamClient(connect_timeout_s=0.001)
    with pytest.raises(ConnectTimedOut):
        await client.open(f"http://silent.invalid{PATH}", BODY, {})
    assert await probe(client, "http://silent.invalid", {}, 5.0) == Probe(Finding.SILENT)
    await client.close()


async def test_a_name_is_looked_up_and_one_that_stands_for_nothing_is_unreachable(
    client: UpstreamClient, upstream: Upstream
) -> None:
    url = f"http://localhost:{upstream.port}{PATH}"
    async with await client.open(url, BODY, {}) as response:
        assert response.status == 200
    assert upstream.calls[0].header("host") == f"localhost:{upstream.port}"
    with pytest.raises(Unreachable):
        await client.open(f"http://no-such-host.invalid{PATH}", BODY, {})


@pytest.mark.parametrize("value", ["a\r\nx-more: b", "a\nb", "a\rb", "a\0b"])
async def test_a_header_cannot_bring_another_one(
    client: UpstreamClient, upstream: Upstream, value: str
) -> None:
    upstream.play(raw(KEPT[0]))
    with pytest.raises(ValueError, match="header"):
        await client.open(upstream.url + PATH, BODY, {"x-one": value})
    assert upstream.accepted == 0


async def test_a_connection_is_not_used_again_while_a_body_is_still_to_be_sent(
    client: UpstreamClient,
) -> None:
    """A server that has read the head and answers at once: the next request would stand behind that body."""
    paths: list[bytes] = []

    async def answers_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        paths.append(head.split(b" ", 2)[1])
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        await over.wait()  # reads no more
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_server(answers_early, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    long = (b"[", memoryview(b"0," * 2**24), b"0]")  # more than the sockets' buffers hold
    for path in ("/first", "/second"):
        async with asyncio.timeout(30), await client.open(url + path, long, {}) as response:
            assert (response.status, await response.body(100)) == (413, b"no")
    over.set()
    server.close()
    assert paths == [b"/first", b"/second"]


@pytest.mark.parametrize("size", [2**16 - 4, 2**16, 2**22])
async def test_a_body_in_pieces_arrives_as_one(client: UpstreamClient, upstream: Upstream, size: int) -> None:
    pieces = (b'{"model":"m","', memoryview(b"ab" * (size // 2)), b'":1}')
    for _ in range(2):
        async with await client.open(upstream.url + PATH, pieces, {}) as response:
            assert response.status == 200
            await response.body(2**20)
    assert [call.body for call in upstream.calls] == [b"".join(pieces)] * 2
    assert {call.header("content-length") for call in upstream.calls} == {str(len(b"".join(pieces)))}
    assert upstream.accepted == 1
