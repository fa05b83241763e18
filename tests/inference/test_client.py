"""The client towards the replicas, against a scripted one: what each failure is called, what is kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ctxgate.inference.client import AnswerTooLarge, Dropped, Unreachable, UpstreamClient
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe, probe, windows_of
from support.behaviours import RESET, plays
from support.gateway import until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.upstream import Exchange, Upstream

PATH = "/v1/chat/completions"
BODY = (b'{"model":"m"}',)


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    """A client that is closed in the end."""
    one = UpstreamClient(connect_timeout_s=5.0)
    yield one
    await one.close()


async def test_pieces_of_a_body_arrive_as_one(client: UpstreamClient, upstream: Upstream) -> None:
    large = (memoryview(b"a" * 100_000), b"b", memoryview(b"c" * 100_000))
    for pieces in (BODY, (b"", b"{}"), large, (b"x" * 70_000,)):
        upstream.play(plays(lambda exchange: exchange.respond(200, b"ok")))
        async with await client.open(upstream.url + PATH, pieces, {"x-request-id": "r"}) as response:
            assert await response.body(10) == b"ok"
        call = upstream.calls[-1]
        assert call.body == b"".join(pieces)
        assert call.header("content-length") == str(len(call.body))
        assert call.header("transfer-encoding") == ""


async def test_nothing_listening_is_unreachable(client: UpstreamClient, upstream: Upstream) -> None:
    await upstream.stop()
    with pytest.raises(Unreachable):
        await client.open(upstream.url + PATH, BODY, {})
    await upstream.start()


async def test_a_connection_that_breaks_before_an_answer_is_dropped(
    client: UpstreamClient, upstream: Upstream
) -> None:
    upstream.play(RESET)
    with pytest.raises(Dropped):
        await client.open(upstream.url + PATH, BODY, {})
    upstream.reset_on_accept = 1
    with pytest.raises((Dropped, Unreachable)):
        await client.open(upstream.url + PATH, BODY, {})


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 50 + b"\r\n\r\n"]
)
async def test_an_answer_that_is_no_http_is_dropped(
    client: UpstreamClient, upstream: Upstream, garbage: bytes
) -> None:
    upstream.play(plays(lambda exchange: exchange.write(garbage)))
    with pytest.raises(Dropped):
        await client.open(upstream.url + PATH, BODY, {})


@pytest.mark.parametrize("how", ["reset", "hang_up"])
async def test_gateways_c8_what_arrived_before_a_break_is_handed_out(
    client: UpstreamClient, upstream: Upstream, how: str
) -> None:
    upstream.play(by_hand)
    opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
    exchange = await upstream.next_call()
    exchange.head()
    exchange.piece(b"one")
    async with await opening as response:
        exchange.piece(b"two")
        getattr(exchange, how)()
        await until(lambda: exchange.connection not in upstream.open)
        for _ in range(5):
            await asyncio.sleep(0)  # both the bytes and the break have been seen by now, or soon will be
        received = b""
        while len(received) < len(b"onetwo"):
            received += await response.next_chunk()
        assert received == b"onetwo"
        with pytest.raises(Dropped):
            await response.next_chunk()


async def test_a_broken_chunk_is_dropped(client: UpstreamClient, upstream: Upstream) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.piece(b"one")
        exchange.write(b"zz\r\nnot a size")

    upstream.play(plays(write))
    with pytest.raises(Dropped):  # by the head or by the body, whichever the parser had come to
        async with await client.open(upstream.url + PATH, BODY, {}) as response:
            await response.body(100)


async def test_a_body_beyond_the_limit_is_refused(client: UpstreamClient, upstream: Upstream) -> None:
    upstream.play(plays(lambda exchange: exchange.respond(200, b"x" * 11)))
    async with await client.open(upstream.url + PATH, BODY, {}) as response:
        with pytest.raises(AnswerTooLarge):
            await response.body(10)


async def test_an_unread_answer_closes_its_connection_and_a_read_one_keeps_it(
    client: UpstreamClient, upstream: Upstream
) -> None:
    for read, closes in ((True, False), (False, True)):
        upstream.play(by_hand)
        opening = asyncio.create_task(client.open(upstream.url + PATH, BODY, {}))
        exchange = await upstream.next_call()
        exchange.head()
        async with await opening as response:
            if read:
                exchange.end()
                assert await response.body(10) == b""
        if closes:
            await until(exchange.closed.is_set)
        else:
            assert exchange.connection in upstream.open


async def test_cookies_and_redirects_are_not_followed(client: UpstreamClient, upstream: Upstream) -> None:
    upstream.default = plays(
        lambda exchange: exchange.respond(302, b"", "text/html", "location: /elsewhere", "set-cookie: a=b")
    )
    for _ in range(2):
        async with await client.open(upstream.url + PATH, BODY, {}) as response:
            assert response.status == 302
    assert upstream.calls[1].header("cookie") == ""
    assert upstream.calls[1].header("user-agent") == ""


@pytest.mark.parametrize(("status", "offered"), [(200, True), (403, False), (404, False), (500, None)])
async def test_abort_tells_whether_the_replica_offers_it(
    client: UpstreamClient, upstream: Upstream, status: int, offered: bool | None
) -> None:
    upstream.abort_status = status
    assert await client.abort(upstream.url, ["chatcmpl-x"], {}) is offered
    assert upstream.abort_calls == [["chatcmpl-x"]]


async def test_abort_at_a_dead_replica_is_no_error(client: UpstreamClient, upstream: Upstream) -> None:
    await upstream.stop()
    assert await client.abort(upstream.url, ["x"], {}) is None
    await upstream.start()


async def test_a_probe_sees_health_and_windows(client: UpstreamClient, upstream: Upstream) -> None:
    assert await probe(client, upstream.url, {}, 5.0) == Probe(Finding.WELL, {"m": 4096})
    upstream.health_status = 503
    assert await probe(client, upstream.url, {}, 5.0) == Probe(Finding.UNWELL)
    await upstream.stop()
    assert await probe(client, upstream.url, {}, 5.0) == Probe(Finding.REFUSED)
    await upstream.start()


@pytest.mark.parametrize("fate", [lambda _: None, lambda exchange: exchange.reset()], ids=["slow", "reset"])
@pytest.mark.parametrize(
    ("path", "expected"), [("/health", Probe(Finding.SILENT)), ("/v1/models", Probe(Finding.WELL))]
)
async def test_an_endpoint_that_gives_no_answer_is_silent_and_only_health_decides(
    client: UpstreamClient,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    fate: Callable[[Exchange], None],
    path: str,
    expected: Probe,
) -> None:
    take = upstream.take
    monkeypatch.setattr(upstream, "take", lambda call: fate(call) if call.path == path else take(call))
    assert await probe(client, upstream.url, {}, 0.2) == expected


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"{", b"", b"\xff", b'"x"', b"null"])
async def test_a_models_document_that_is_none_leaves_a_replica_well(
    client: UpstreamClient, upstream: Upstream, raw: bytes
) -> None:
    upstream.models = raw
    assert await probe(client, upstream.url, {}, 5.0) == Probe(Finding.WELL)


@pytest.mark.parametrize(
    ("document", "windows"),
    [
        (
            {"data": [{"id": "a", "max_model_len": 8}, {"id": "b", "max_model_len": None}]},
            {"a": 8, "b": None},
        ),
        (
            {"data": [{"id": "a"}, {"id": 7}, None, "x", {"id": "c", "max_model_len": "9"}]},
            {"a": None, "c": None},
        ),
        ({"data": None}, {}),
        ([], {}),
        (None, {}),
    ],
)
def test_windows_are_read_where_they_are_numbers(document: object, windows: dict[str, int | None]) -> None:
    assert windows_of(document) == windows
