"""Clients that leave, at every point: the call ends at the engine, its usage is read, nothing is left."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import NOTHING_USED, UNKNOWN, Certainty, estimated, measured
from support.behaviours import streams_until_aborted, until_aborted
from support.client import CHAT
from support.gateway import HELLO, MODEL, STREAM, bearer, until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.client import Wire
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

COMPLETION = {"model": MODEL, "prompt": "hello"}
LEAVINGS = ("fin", "rst")


async def leave(wire: Wire, how: str) -> None:
    """Close the client's side."""
    if how == "rst":
        wire.reset()
    else:
        await wire.close()


async def nothing_left(gateway: Gateway, upstream: Upstream, before: set[asyncio.Task[Any]]) -> None:
    """No open request, gauge, task or busy upstream connection is left of a request that is over."""
    await gateway.quiet()
    await until(lambda: not (asyncio.all_tasks() - before - _servers_tasks(upstream)))
    metrics = await gateway.metrics()
    assert metrics["ctxgate_open_requests"] == 0
    assert all(value == 0 for name, value in metrics.items() if name.startswith("ctxgate_in_flight"))
    await until(lambda: all(one.exchange is None or one.exchange.finished.is_set() for one in upstream.open))


def _servers_tasks(upstream: Upstream) -> set[asyncio.Task[None]]:
    return upstream._tasks


@pytest.mark.parametrize("how", LEAVINGS)
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/completions", COMPLETION)])
@pytest.mark.parametrize("stream", [True, False])
async def test_gateways_c3_leaving_before_the_headers_aborts_by_id_and_books_nothing_for_a_queued_call(
    gateway: Gateway, upstream: Upstream, how: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    before = asyncio.all_tasks()
    upstream.play(until_aborted)
    async with gateway.wire() as wire:
        wire.request(path, body | {"stream": stream}, [bearer()])
        await until(lambda: upstream.calls)
        await leave(wire, how)
        await until(lambda: upstream.abort_calls)
    (exchange,) = upstream.calls
    assert set(map(tuple, upstream.abort_calls)) == {(exchange.engine_id,)}
    await nothing_left(gateway, upstream, before)
    row = await gateway.row()
    assert row.settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert row.settled.usage == NOTHING_USED  # vLLM had not scheduled it: the engine counted nothing
    assert row.settled.charge.total == 0
    assert row.opened.attempt_id == exchange.request_id


@pytest.mark.parametrize("how", LEAVINGS)
@pytest.mark.parametrize("texts", [(), ("a ", "b ", "c ")], ids=["before the first token", "mid-stream"])
async def test_gateways_c5_leaving_a_stream_books_what_the_engine_says_it_made(
    gateway: Gateway, upstream: Upstream, how: str, texts: tuple[str, ...]
) -> None:
    before = asyncio.all_tasks()
    upstream.play(streams_until_aborted(*texts))
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        await wire.head()
        received = b""
        while received.count(b"data: ") < 1 + len(texts):
            received += await wire.chunk()
        await leave(wire, how)
        await nothing_left(gateway, upstream, before)
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.finish_reason) == (Outcome.CLIENT_DISCONNECTED, "abort")
    # More than the client saw: the engine had made two further tokens when the abort came.
    assert settled.usage.output == measured(len(texts) + 2)
    assert (settled.usage.uncached, settled.usage.cached) == (measured(8), measured(32))
    assert settled.charge.total == 8_000 + 3_200 + (len(texts) + 2) * 2_000
    assert settled.charge.exact


async def test_leaving_after_the_last_text_still_reads_the_usage(
    gateway: Gateway, upstream: Upstream
) -> None:
    before = asyncio.all_tasks()
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("x")
        exchange.chunk({}, "stop")
        await wire.head()
        received = b""
        while b'"stop"' not in received:
            received += await wire.chunk()
        await wire.close()
        await until(exchange.aborted.is_set)
        exchange.usage_chunk(completion=1)
        exchange.done()
        await nothing_left(gateway, upstream, before)
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.finish_reason) == (Outcome.CLIENT_DISCONNECTED, "stop")
    assert settled.usage.output == measured(1)


@pytest.mark.parametrize("how", LEAVINGS)
async def test_leaving_after_done_is_a_completed_request(
    gateway: Gateway, upstream: Upstream, how: str
) -> None:
    before = asyncio.all_tasks()
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        await wire.head()
        while await wire.chunk() != b"data: [DONE]\n\n":
            pass
        await leave(wire, how)
        await nothing_left(gateway, upstream, before)
    assert (await gateway.row()).settled.outcome is Outcome.COMPLETED
    assert upstream.abort_calls == []


async def test_leaving_a_whole_answer_books_the_aborted_calls_usage(
    gateway: Gateway, upstream: Upstream
) -> None:
    before = asyncio.all_tasks()
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=HELLO, headers=[bearer()])
        exchange = await upstream.next_call()
        await wire.close()
        await until(exchange.aborted.is_set)
        exchange.answer("abort", "some text", completion=9)
        await nothing_left(gateway, upstream, before)
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.finish_reason) == (Outcome.CLIENT_DISCONNECTED, "abort")
    assert settled.usage.output == measured(9)
    assert settled.charge.total == 8_000 + 3_200 + 18_000


async def test_routing_g8_the_abort_is_repeated_until_an_engine_that_was_still_reading_knows_the_id(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        await wire.close()
        await until(lambda: len(upstream.abort_calls) >= 3)
        exchange.head()
        exchange.end_aborted(completion=2)
    await gateway.quiet()
    assert (await gateway.row()).settled.usage.output == measured(2)
    assert set(map(tuple, upstream.abort_calls)) == {(exchange.engine_id,)}


async def test_an_abort_that_got_no_answer_is_tried_again(gateway: Gateway, upstream: Upstream) -> None:
    """A busy engine may not answer in time: that is no reason to give its exact usage up."""
    upstream.aborts_lost = 2
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("x")
        await wire.head()
        await wire.chunk()
        await wire.close()
        await exchange.aborted.wait()
        exchange.end_aborted(completion=2)
    await gateway.quiet()
    assert len(upstream.abort_calls) >= 3
    assert (await gateway.row()).settled.usage.output == measured(2)


async def test_routing_g8_every_prompt_of_a_completions_call_is_aborted(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(until_aborted)
    async with gateway.wire() as wire:
        wire.request("/v1/completions", STREAM | {"prompt": ["a", "b", "c"]}, [bearer()])
        await until(lambda: upstream.calls)
        await wire.close()
        await until(lambda: upstream.abort_calls)
    call = upstream.calls[0].request_id
    assert upstream.abort_calls[0] == [f"cmpl-{call}-{number}" for number in range(3)]
    await gateway.quiet()


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize("stream", [True, False])
async def test_without_an_abort_route_the_connection_is_closed_and_the_row_estimated(
    gateway: Gateway, upstream: Upstream, status: int, stream: bool
) -> None:
    before = asyncio.all_tasks()
    upstream.abort_status = status
    upstream.play(until_aborted)
    async with gateway.wire() as wire:
        wire.request(body=HELLO | {"stream": stream}, headers=[bearer()])
        await until(lambda: upstream.calls)
        await wire.close()
        await until(upstream.calls[0].closed.is_set)
        await nothing_left(gateway, upstream, before)
    row = await gateway.row()
    assert row.settled.outcome is Outcome.CLIENT_DISCONNECTED
    size = len(json.dumps(HELLO | {"stream": stream})) + (44 if stream else 0)
    assert row.opened.body_bytes == len(upstream.calls[0].body)
    assert abs(row.opened.body_bytes - size) < 10
    assert row.settled.usage.uncached == estimated(-(-row.opened.body_bytes // 4))
    assert row.settled.usage.output == UNKNOWN
    assert len(upstream.abort_calls) == 1


async def test_a_pool_without_abort_is_hung_up_on_and_estimated_from_what_came(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, pool={"abort": False})
    before = asyncio.all_tasks()
    upstream.play(streams_until_aborted("a" * 40))
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        await wire.head()
        received = b""
        while b"aaaa" not in received:
            received += await wire.chunk()
        await wire.close()
        await until(upstream.calls[0].closed.is_set)
        await nothing_left(gateway, upstream, before)
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert settled.usage.output == estimated(10)
    assert settled.usage.uncached.certainty is Certainty.ESTIMATED
    assert upstream.abort_calls == []
    # The client left; the upstream broke nothing off, and its replica is as well as before.
    metrics = await gateway.metrics()
    assert metrics.get('ctxgate_stream_truncated_total{pool="standard"}', 0) == 0
    assert gateway.services.fleet.record("standard", "standard-0").health.failures == 0


async def test_an_engine_that_ignores_the_abort_is_left_after_the_drain_time(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(abort_drain_s=0.05))
    before = asyncio.all_tasks()
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("x")
        await wire.head()
        await wire.chunk()
        await wire.close()
        await until(exchange.closed.is_set)
    await nothing_left(gateway, upstream, before)
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert settled.usage.output == estimated(1)
    assert gateway.services.fleet.record("standard", "standard-0").health.failures == 0


async def test_leaving_while_the_body_is_sent_books_and_sends_nothing(
    gateway: Gateway, upstream: Upstream
) -> None:
    before = asyncio.all_tasks()
    async with gateway.wire() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\n"
        wire.send(head.encode() + b'content-length: 9999\r\n\r\n{"model":')
        await until(lambda: gateway.state.tasks)
        await wire.close()
    await nothing_left(gateway, upstream, before)
    assert await gateway.rows() == []
    assert upstream.calls == []
    metrics = await gateway.metrics()
    assert metrics['ctxgate_requests_total{status="none",surface="chat"}'] == 1


async def test_routing_a5_random_leavings_give_every_count_back(gateway: Gateway, upstream: Upstream) -> None:
    before = asyncio.all_tasks()
    upstream.default = streams_until_aborted("a ", "b ")

    async def one(number: int) -> None:
        async with gateway.wire() as wire:
            wire.request(body=STREAM, headers=[bearer()])
            if number % 4 >= 1:
                await wire.head()
            received = b""
            while received.count(b"data: ") < number % 4:
                received += await wire.chunk()
            await leave(wire, LEAVINGS[number % 2])

    await asyncio.gather(*(one(number) for number in range(60)))
    await nothing_left(gateway, upstream, before)
    rows = await gateway.rows()
    ids = [exchange.request_id for exchange in upstream.calls]
    assert sorted(row.opened.attempt_id for row in rows) == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {row.settled.outcome for row in rows} == {Outcome.CLIENT_DISCONNECTED}
    assert sum(row.settled.usage.output.value or 0 for row in rows) == 4 * len(ids)


async def test_a_client_that_leaves_as_the_answer_ends_is_booked_once(
    gateway: Gateway, upstream: Upstream
) -> None:
    def finish(exchange: Exchange) -> None:
        exchange.chunk({}, "stop")
        exchange.usage_chunk()
        exchange.done()

    for _ in range(20):
        upstream.play(by_hand)
        async with gateway.wire() as wire:
            wire.request(body=STREAM, headers=[bearer()])
            exchange = await upstream.next_call()
            exchange.head()
            exchange.text("x")
            await wire.head()
            await wire.chunk()
            finish(exchange)
            wire.reset()
    await gateway.quiet()
    rows = await gateway.rows()
    assert len(rows) == 20
    assert {row.settled.outcome for row in rows} <= {Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED}
    assert {row.settled.charge.total for row in rows} == {17_200}


async def test_a_call_of_very_many_prompts_is_hung_up_on_instead_of_aborted(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(until_aborted)
    async with gateway.wire() as wire:
        wire.request("/v1/completions", {"model": MODEL, "prompt": ["x"] * 1025}, [bearer()])
        await until(lambda: upstream.calls)
    await until(upstream.calls[0].closed.is_set)
    await gateway.quiet()
    assert upstream.abort_calls == []
    assert (await gateway.row()).settled.outcome is Outcome.CLIENT_DISCONNECTED
