"""How long a request's body is waited for: until nothing more comes, or the gateway is to end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.edge import Stopping, read_body
from ctxgate.gateway.errors import Kind, Refused
from support.client import CHAT, WAIT_S
from support.gateway import bearer, until

if TYPE_CHECKING:
    from ctxgate.gateway.edge import Message
    from support.gateway import Gateway
    from support.upstream import Upstream


def piece(data: bytes, *, more: bool = False) -> Message:
    """An ASGI message with a part of the body."""
    return {"type": "http.request", "body": data, "more_body": more}


class Dripping:
    """A client that sends what a test puts, and then nothing."""

    def __init__(self, *messages: Message) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message)

    def read(self, stopping: Stopping) -> asyncio.Task[bytes]:
        return asyncio.create_task(read_body(self.messages.get, {}, 10, stopping))


@pytest.mark.parametrize("before", [[], [piece(b"x", more=True)]])
async def test_a_body_that_stops_coming_is_408(
    before: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.edge.BODY_IDLE_S", 0.01)
    stopping = Stopping()
    with pytest.raises(Refused) as refused:
        await Dripping(*before).read(stopping)
    assert (refused.value.kind, refused.value.status) == (Kind.REQUEST_TIMEOUT, 408)
    assert not stopping.reading


async def test_every_piece_of_a_body_gives_it_new_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    client, stopping = Dripping(piece(b"a", more=True)), Stopping()
    reading = client.read(stopping)
    await until(lambda: stopping.reading and client.messages.empty())
    (wait,) = stopping.reading
    wait.reschedule(loop.time() + 0.5)  # almost over
    client.messages.put_nowait(piece(b"b", more=True))
    await until(client.messages.empty)
    await until(lambda: (wait.when() or 0.0) > loop.time() + 30.0)
    client.messages.put_nowait(piece(b"c"))
    assert await reading == b"abc"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("before", [[], [piece(b"x", more=True)]])
async def test_a_body_is_not_waited_for_when_the_gateway_stops(before: list[Message], first: bool) -> None:
    client, stopping = Dripping(*before), Stopping()
    if first:
        stopping.set()
    reading = client.read(stopping)
    if not first:
        await until(lambda: stopping.reading and client.messages.empty())
        stopping.set()
        stopping.set()
    with pytest.raises(Refused) as refused:
        await asyncio.wait_for(reading, WAIT_S)
    assert (refused.value.kind, refused.value.retry_after_s) == (Kind.SHUTTING_DOWN, 2)
    assert not stopping.reading


async def test_a_drip_does_not_hold_the_end_of_the_gateway_up() -> None:
    client, stopping = Dripping(piece(b"a", more=True)), Stopping()
    reading = client.read(stopping)
    await until(lambda: stopping.reading and client.messages.empty())
    client.messages.put_nowait(piece(b"b", more=True))  # it comes in the same turn
    stopping.set()
    with pytest.raises(Refused) as refused:
        await asyncio.wait_for(reading, WAIT_S)
    assert refused.value.kind is Kind.SHUTTING_DOWN


async def test_a_body_that_is_there_is_taken_by_a_gateway_that_stops() -> None:
    async def receive() -> Message:
        return piece(b"whole")

    stopping = Stopping()
    stopping.set()
    assert await read_body(receive, {}, 10, stopping) == b"whole"


async def test_a_client_that_stops_in_its_body_is_told_and_disconnected(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.edge.BODY_IDLE_S", 0.02)
    async with gateway.wire() as wire:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\ncontent-length: 99\r\n\r\n"
        )
        wire.send(head.encode() + b"{")
        answer = await wire.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.header("connection") == "close"
        assert answer.header("x-request-id").startswith("req_")
        assert await wire.closed()
    assert (upstream.calls, await gateway.rows()) == ([], [])
