"""What uvicorn's protocol is given beyond its own: bounds on a head, the envelope, requests that upgrade."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.client import CHAT
from support.gateway import HELLO, bearer, until

if TYPE_CHECKING:
    from support.gateway import Gateway
    from support.upstream import Upstream

pytestmark = pytest.mark.integration


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
