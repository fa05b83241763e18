"""Replicas that cannot be reached or give no answer: what their requests get, and what becomes of them.

Each server that fails stands beside one that is well. Nothing that had no first byte may fail.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.probe import probe
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED
from support.behaviours import BUSY
from support.gateway import HELLO, STREAM, until
from support.upstream import Connection, by_hand, stream_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]
REQUESTS = 24


@dataclass
class Address:
    """Where a replica is said to be."""

    url: str


def conversation(number: int) -> dict[str, Any]:
    """The first request of a conversation of its own."""
    return STREAM | {"messages": [{"role": "user", "content": f"conversation {number}"}]}


async def plain_port(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> str:
    """TLS to a server that speaks none, and says so."""
    received = Connection.data_received

    def refuse(connection: Connection, data: bytes) -> None:
        if connection.upstream is not upstream:
            received(connection, data)
            return
        connection.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        connection.transport.close()

    monkeypatch.setattr(Connection, "data_received", refuse)
    return f"https://127.0.0.1:{upstream.port}"


async def no_name(_: Upstream, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that stands for nothing."""

    async def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    return "http://no-such-host.invalid:8000"


async def closed_port(*_: object) -> str:
    """A port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


FAILURES = pytest.mark.parametrize(
    "failing", [plain_port, no_name, closed_port], ids=["TLS", "DNS", "refused"]
)


@FAILURES
async def test_no_connection_fails_no_request_and_opens_the_breaker(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Start,
    monkeypatch: pytest.MonkeyPatch,
    failing: Any,
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.get_running_loop().create_future()

    # No probe tells: the requests find it out themselves.
    monkeypatch.setattr("ctxgate.gateway.replica_watch.probe", never)
    gateway = await start_gateway(Address(await failing(other_upstream, monkeypatch)), upstream)
    (bad, good) = gateway.services.fleet.records()
    for number in range(REQUESTS):
        answer = await gateway.post(conversation(number))
        assert (answer.status, answer.events[-1]) == (200, b"[DONE]")
        assert answer.header("x-ctxgate-replica") == "standard-1"
    rows = await gateway.rows()
    lost = [row for row in rows if row.opened.replica == "standard-0"]
    assert len(rows) == REQUESTS + len(lost)
    assert len(lost) == 3  # then its breaker is open
    assert {row.settled.outcome for row in lost} == {Outcome.UNREACHABLE}
    assert {row.settled.usage for row in lost} == {NOTHING_USED}
    assert bad.health.open_until_us > 0
    assert (bad.in_flight, bad.prefill_tokens, good.in_flight, good.prefill_tokens) == (0, 0, 0, 0)


@FAILURES
async def test_probes_find_out_that_no_connection_can_be_made(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Start,
    monkeypatch: pytest.MonkeyPatch,
    failing: Any,
) -> None:
    gateway = await start_gateway(Address(await failing(other_upstream, monkeypatch)), upstream)
    bad, _ = gateway.services.fleet.records()
    await until(lambda: not bad.health.probe_ok)
    for number in range(REQUESTS):
        assert (await gateway.post(conversation(number))).status == 200
    assert {row.opened.replica for row in await gateway.rows()} == {"standard-1"}


async def test_a_certificate_that_is_not_trusted_is_no_connection(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def untrusted(*_: object, **__: object) -> None:
        raise ssl.SSLCertVerificationError(1, "certificate verify failed")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", untrusted)
    gateway = await start_gateway(Address(f"https://127.0.0.1:{upstream.port}"))
    (bad,) = gateway.services.fleet.records()
    await until(lambda: not bad.health.probe_ok)
    assert bad.health.refused


async def test_bytes_that_trickle_before_the_headers_do_not_move_the_first_bytes_limit(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(first_byte_timeout_s=0.1, abort_drain_s=0.05))

    async def trickles(exchange: Exchange) -> None:
        exchange.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
        while not exchange.closed.is_set():
            exchange.write(b"a")
            await asyncio.sleep(0.001)

    upstream.default = trickles
    answer = await gateway.post(STREAM)
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert (await gateway.row()).settled.outcome is Outcome.TIMED_OUT
    await gateway.quiet()
    (record,) = gateway.services.fleet.records()
    assert (record.in_flight, record.prefill_tokens, record.decoding) == (0, 0, 0)


async def test_a_probe_whose_answer_trickles_is_silent(gateway: Gateway) -> None:
    ended = asyncio.Event()

    async def trickles(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
        while not writer.is_closing():
            writer.write(b"a")
            await asyncio.sleep(0.001)
        ended.set()

    server = await asyncio.start_server(trickles, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = await probe(gateway.services.client, url, {}, 0.05)
    assert found.finding.name == "SILENT"
    await asyncio.wait_for(ended.wait(), 10)
    server.close()


async def test_routing_a7_a_request_that_touches_two_replicas_is_counted_at_each_while_it_is_there(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    first, second = gateway.services.fleet.records()
    for server in (upstream, other_upstream):
        server.default = by_hand
    asked = asyncio.create_task(gateway.post(HELLO))
    await until(lambda: upstream.calls or other_upstream.calls)
    if not upstream.calls:
        first, second = second, first
    before = upstream if upstream.calls else other_upstream
    after = other_upstream if before is upstream else upstream
    assert (first.in_flight, second.in_flight) == (1, 0)
    waiting = first.prefill_tokens
    (call,) = before.calls
    await BUSY(call)
    await until(lambda: after.calls)
    assert (first.in_flight, second.in_flight) == (0, 1)
    assert (first.prefill_tokens, second.prefill_tokens) == (0, waiting)
    after.calls[0].answer()
    assert (await asked).status == 200
    await gateway.quiet()
    assert (first.in_flight, second.in_flight) == (0, 0)
    assert (first.prefill_tokens, second.prefill_tokens) == (0, 0)


# ---- a replica that hangs ------------------------------------------------------------------------------


async def hanging(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Start,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> tuple[Gateway, asyncio.Event]:
    """A gateway whose probes find the first replica silent from when the event is set."""
    hangs = asyncio.Event()

    async def sometimes(client: Any, url: str, *rest: Any) -> Any:
        found = await probe(client, url, *rest)
        return type(found)(type(found.finding).SILENT) if hangs.is_set() and url == upstream.url else found

    monkeypatch.setattr("ctxgate.gateway.replica_watch.probe", sometimes)
    monkeypatch.setattr("ctxgate.gateway.replica_watch.PROBE_EVERY_S", 0.005)
    upstream.default = by_hand
    return await start_gateway(upstream, other_upstream, **options), hangs


async def test_calls_without_an_answer_leave_a_replica_that_the_probes_find_silent(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, hangs = await hanging(upstream, other_upstream, start_gateway, monkeypatch)
    asked = [asyncio.create_task(gateway.post(conversation(number))) for number in range(REQUESTS)]
    begun = await upstream.next_call()
    begun.head()
    begun.text("a")
    await until(lambda: sum(task.done() for task in asked) + len(upstream.calls) == REQUESTS)
    hangs.set()
    await until(lambda: sum(task.done() for task in asked) == REQUESTS - 1)
    assert not begun.closed.is_set()  # it may go on, and its client has a part of it
    begun.done()
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    rows = await gateway.rows()
    left = [row for row in rows if row.settled.outcome is Outcome.UNREACHABLE]
    assert len(left) == len(upstream.calls) - 1 > 0
    assert {row.opened.replica for row in left} == {"standard-0"}
    assert {row.settled.usage for row in left} == {NOTHING_KNOWN}
    await gateway.quiet()
    aborted = {one for ids in upstream.abort_calls for one in ids}
    assert aborted == {f"chatcmpl-{row.opened.attempt_id}" for row in left}  # nothing runs on there unread
    for record in gateway.services.fleet.records():
        assert (record.in_flight, record.prefill_tokens, record.decoding) == (0, 0, 0)


async def test_a_call_stays_at_a_silent_replica_where_there_is_no_other(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, hangs = await hanging(upstream, other_upstream, start_gateway, monkeypatch)
    bad, other = gateway.services.fleet.records()
    other.draining = True
    asked = asyncio.create_task(gateway.post(HELLO))
    call = await upstream.next_call()
    hangs.set()
    await until(lambda: not bad.health.probe_ok)
    call.answer()
    assert (await asked).status == 200
    assert [row.settled.outcome for row in await gateway.rows()] == [Outcome.COMPLETED]


async def test_a_call_that_may_not_be_tried_again_stays_too(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, hangs = await hanging(
        upstream, other_upstream, start_gateway, monkeypatch, limits=Limits(max_attempts=1)
    )
    other_upstream.default = by_hand
    asked = [asyncio.create_task(gateway.post(conversation(number))) for number in range(REQUESTS)]
    await until(lambda: len(upstream.calls) + len(other_upstream.calls) == REQUESTS)
    hangs.set()
    bad, _ = gateway.services.fleet.records()
    await until(lambda: not bad.health.probe_ok)
    for call in [*upstream.calls, *other_upstream.calls]:
        stream_of("a ")(call)
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    assert len(await gateway.rows()) == REQUESTS
    assert {row.settled.outcome for row in await gateway.rows()} == {Outcome.COMPLETED}
