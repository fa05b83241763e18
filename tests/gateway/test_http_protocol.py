"""What uvicorn's protocol is given beyond its own: bounds on a head, the envelope, requests that upgrade."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.http_protocol import MAX_PIPELINED, MOST_WAITING, HttpProtocol
from ctxgate.gateway.ledger import Outcome
from support.client import CHAT
from support.gateway import HELLO, STREAM, bearer, until
from support.upstream import by_hand

if TYPE_CHECKING:
    from support.gateway import Gateway
    from support.upstream import Upstream

pytestmark = pytest.mark.integration


def only_connection(gateway: Gateway) -> HttpProtocol:
    """The gateway's side of the one open connection."""
    (connection,) = gateway.state.connections
    assert isinstance(connection, HttpProtocol)
    return connection


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_upgrade_that_is_not_offered_does_not_lose_the_body(
    gateway: Gateway, upstream: Upstream, framing: str
) -> None:
    body = json.dumps(HELLO).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    more = [("transfer-encoding", "chunked")] if framing == "chunked" else []
    async with gateway.wire() as wire:
        for _ in range(2):  # and the connection is kept
            wire.request(
                body=chunked if more else body,
                headers=[
                    bearer(),
                    ("Connection", "Upgrade, HTTP2-Settings"),
                    ("Upgrade", "h2c"),
                    ("HTTP2-Settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"),
                    *more,
                ],
            )
            assert (await wire.answer()).status == 200
        wire.request(body=body, headers=[bearer()])
        assert (await wire.answer()).status == 200
    assert [call.body for call in upstream.calls] == [body] * 3


async def test_the_body_of_an_upgrade_may_come_later_and_in_parts(gateway: Gateway) -> None:
    body = json.dumps(HELLO).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\nconnection: upgrade\r\n"
    async with gateway.wire() as wire:
        wire.send(head.encode() + b"upgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(body))
        await until(lambda: gateway.state.tasks)
        wire.send(body[:9])
        wire.send(body[9:])
        assert (await wire.answer()).status == 200


async def test_a_websocket_is_answered_by_http(gateway: Gateway) -> None:
    async with gateway.wire() as wire:
        wire.request("/v1/realtime", None, [bearer(), ("upgrade", "websocket"), ("connection", "Upgrade")])
        answer = await wire.answer()
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")


async def test_very_many_pipelined_upgrades_are_answered_one_by_one(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    offer = b"GET /health HTTP/1.1\r\nhost: g\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    async with gateway.wire() as wire:
        wire.send(offer * 2000 + b"GET /nowhere HTTP/1.1\r\nhost: g\r\n\r\n")
        for _ in range(2000):
            assert (await wire.answer()).status == 200
        assert (await wire.answer()).status == 404
    assert not caplog.records


async def test_an_upgrade_is_followed_by_bytes_that_are_no_request(gateway: Gateway) -> None:
    offer = b"GET /health HTTP/1.1\r\nhost: g\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    async with gateway.wire() as wire:
        wire.send(offer + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await wire.answer()).status == 400
    await until(lambda: not gateway.state.connections)


@pytest.mark.parametrize("count", [1, MAX_PIPELINED])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_after_pipelining_more_requests_is_noticed(
    gateway: Gateway, upstream: Upstream, count: int, stream: bool
) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM if stream else HELLO, headers=[bearer()])
        exchange = await upstream.next_call()
        if stream:
            exchange.head()
            exchange.text("a ")
            await wire.head()
        for _ in range(count):
            wire.request(body=HELLO, headers=[bearer()])
        connection = only_connection(gateway)
        await until(lambda: len(connection.pipeline) == count)
    await until(exchange.aborted.is_set)
    exchange.end_aborted() if stream else exchange.answer("abort")
    await gateway.quiet()
    assert (await gateway.row()).settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert len(upstream.calls) == 1  # what was waiting behind it is not begun


async def test_no_more_than_a_few_requests_are_read_ahead(gateway: Gateway, upstream: Upstream) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=HELLO, headers=[bearer()])
        exchange = await upstream.next_call()
        connection = only_connection(gateway)
        for _ in range(MAX_PIPELINED):
            wire.request("/health")
        await until(lambda: len(connection.pipeline) == MAX_PIPELINED)
        assert not connection.flow.read_paused
        wire.request("/health")
        await until(lambda: connection.flow.read_paused)
        exchange.answer()
        for _ in range(MAX_PIPELINED + 2):
            assert (await wire.answer()).status == 200


async def test_a_body_is_read_without_a_pause_until_much_of_it_waits(gateway: Gateway) -> None:
    body = b'{"messages": "' + b"x" * 2 * MOST_WAITING + b'"}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\ncontent-length: {len(body)}"
    async with gateway.wire() as wire:
        wire.send(head.encode() + b"\r\n\r\n")
        await until(lambda: gateway.state.tasks)
        connection = only_connection(gateway)
        paused = []
        for start in range(0, len(body), MOST_WAITING // 2):  # the request's task does not run meanwhile
            connection.data_received(body[start : start + MOST_WAITING // 2])
            paused.append(connection.flow.read_paused)
        answer = await wire.answer()
        assert not connection.flow.read_paused
    assert paused == [False, False, True, True, True]
    assert (answer.status, answer.error["param"]) == (400, "model")  # it was read to its end


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(
    gateway: Gateway, upstream: Upstream, more: bytes
) -> None:
    upstream.play(by_hand)
    body = json.dumps(STREAM).encode()
    async with gateway.wire() as wire:
        head = f"POST {CHAT} HTTP/1.0\r\nauthorization: {bearer()[1]}\r\ncontent-length: {len(body)}\r\n"
        wire.send(head.encode() + more + b"\r\n" + body)
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("first")
        answer = await wire.head()
        assert (answer.header("transfer-encoding"), answer.header("content-length")) == ("", "")
        assert answer.header("connection") == "close"
        event = await asyncio.wait_for(wire.reader.readuntil(b"\n\n"), 10)  # it comes as it is made
        assert json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "first"
        exchange.chunk({}, "stop")
        exchange.usage_chunk()
        exchange.done()
        rest = await asyncio.wait_for(wire.reader.read(), 10)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert all(part.startswith(b"data: ") for part in rest.split(b"\n\n")[:-1])
    assert (await gateway.row()).settled.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("method", "length"), [("GET", 15), ("HEAD", 0)])
async def test_http_1_0_gets_a_known_length_as_it_is(gateway: Gateway, method: str, length: int) -> None:
    path = "/health" if method == "GET" else "/"
    async with gateway.wire() as wire:
        wire.send(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
        answer = await wire.answer()
        assert (answer.status, answer.header("content-length")) == (200, str(length))
        assert await wire.closed()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"CONNECT internal:443 HTTP/1.1\r\nhost: internal\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: -1\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_400_in_the_envelope_and_closes(
    gateway: Gateway, upstream: Upstream, raw: bytes
) -> None:
    async with gateway.wire() as wire:
        wire.send(raw)
        answer = await wire.answer()
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert await wire.closed()
    assert upstream.calls == []


@pytest.mark.parametrize("shape", ["one header", "many headers", "path"])
async def test_a_head_without_end_is_cut_off(gateway: Gateway, shape: str) -> None:
    async with gateway.wire() as wire:
        start, more = {
            "one header": (b"GET / HTTP/1.1\r\nx: ", b"y" * 2**16),
            "many headers": (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 2**13),
            "path": (b"GET /", b"y" * 2**16),
        }[shape]
        wire.send(start)
        for _ in range(64):
            wire.send(more)
        # The refusal itself may be lost in the flood; that the connection ends is what counts.
        await until(lambda: not gateway.state.connections)
    assert await gateway.rows() == []


async def test_a_large_head_within_the_bound_is_read(gateway: Gateway) -> None:
    answer = await gateway.post(HELLO, headers=[bearer(), ("x-codex-turn-metadata", "y" * 2**17)])
    assert answer.status == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"])
async def test_slowloris_a_head_that_does_not_come_ends_the_connection(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("ctxgate.gateway.http_protocol.HEAD_TIMEOUT_S", 0.02)
    async with gateway.wire() as wire:
        wire.send(sent)
        assert await wire.closed()
    await until(lambda: not gateway.state.connections)


async def test_slowloris_a_later_head_on_a_kept_connection_is_bounded_too(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway.wire() as wire:
        wire.request("/health")
        assert (await wire.answer()).status == 200
        monkeypatch.setattr("ctxgate.gateway.http_protocol.HEAD_TIMEOUT_S", 0.02)
        wire.send(b"GET /health HTTP/1.1\r\n")
        assert await wire.closed()
