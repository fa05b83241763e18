"""Calls that end before their answer is whole: at the engine, by the gateway's own decision."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import Certainty, measured
from support.behaviours import plays
from support.gateway import HELLO, STREAM, bearer, until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


async def test_at_the_end_of_the_grace_a_stream_is_aborted_and_booked_exactly(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("some text")
        await wire.head()
        await wire.chunk()
        gateway.application.call_off()
        await exchange.aborted.wait()
        exchange.chunk({}, "abort")
        exchange.usage_chunk(completion=7)
        exchange.done()
        rest = b""
        while chunk := await wire.chunk():
            rest += chunk
    assert b'"code":"shutting_down"' in rest
    assert b"[DONE]" not in rest
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.SHUTDOWN
    assert settled.usage.output == measured(7)


async def test_a_whole_answer_that_comes_in_time_is_delivered_all_the_same(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    asking = asyncio.create_task(gateway.post(HELLO))
    exchange = await upstream.next_call()
    gateway.application.call_off()
    await exchange.aborted.wait()
    exchange.answer()
    answer = await asking
    assert answer.status == 200
    assert (await gateway.row()).settled.outcome is Outcome.COMPLETED


async def test_a_late_answer_is_aborted_and_what_it_used_is_booked(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(first_byte_timeout_s=0.05))
    upstream.play(by_hand)
    asking = asyncio.create_task(gateway.post(HELLO))
    exchange = await upstream.next_call()
    await exchange.aborted.wait()
    exchange.answer("abort", completion=9)
    answer = await asking
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.TIMED_OUT
    assert settled.usage.output == measured(9)


async def trickle(exchange: Exchange) -> None:
    """A stream that never ends, a byte of text at a time, until the gateway has had enough."""
    exchange.head()
    while not exchange.aborted.is_set() and not exchange.closed.is_set():
        exchange.text("x")
        await asyncio.sleep(0.002)  # the pace of the trickle; nothing waits for it


async def test_a_stream_that_trickles_for_ever_is_aborted_and_its_usage_read(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(total_timeout_s=0.2))

    async def play(exchange: Exchange) -> None:
        await trickle(exchange)
        exchange.end_aborted(completion=7)

    upstream.play(play)
    answer = await gateway.post(STREAM)
    assert [document["error"]["code"] for document in answer.documents if "error" in document] == [
        "upstream_timeout"
    ]
    assert answer.body.endswith(b'"code":"upstream_timeout"}}\n\n')
    assert b"[DONE]" not in answer.body
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.usage.output) == (Outcome.TIMED_OUT, measured(7))
    await gateway.quiet()


@pytest.mark.parametrize("abort", [True, False])
async def test_a_trickle_that_no_abort_ends_is_hung_up_on_and_its_usage_estimated(
    upstream: Upstream, start_gateway: Start, *, abort: bool
) -> None:
    limits = Limits(total_timeout_s=0.2, abort_drain_s=0.1)
    gateway = await start_gateway(upstream, limits=limits, pool={"abort": abort})
    upstream.aborts_lost = 1000
    upstream.play(trickle)
    answer = await gateway.post(STREAM)
    assert answer.documents[-1]["error"]["code"] == "upstream_timeout"
    assert b"[DONE]" not in answer.body
    await until(upstream.calls[0].closed.is_set)
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.TIMED_OUT
    assert settled.usage.output.certainty is Certainty.ESTIMATED
    assert settled.usage.output.value
    await gateway.quiet()


async def test_a_slow_client_is_not_blamed_for_the_length_of_a_stream(
    upstream: Upstream, start_gateway: Start
) -> None:
    """It takes nothing at that moment, but has been silent for far less than it may be."""
    gateway = await start_gateway(upstream, limits=Limits(total_timeout_s=0.3))
    upstream.play(by_hand)
    async with gateway.wire(receive_buffer=4096) as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport can
        while not exchange.closed.is_set() and not exchange.aborted.is_set():
            exchange.text("x" * 50_000)
            await asyncio.sleep(0.002)  # the pace of the flood; nothing waits for it
        exchange.end_aborted(completion=77)
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined] # a socket's transport can
        await wire.head()
        rest = b""
        while chunk := await wire.chunk():
            rest += chunk
    assert rest.endswith(b'"code":"upstream_timeout"}}\n\n')
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.usage.output) == (Outcome.TIMED_OUT, measured(77))
    await gateway.quiet()


async def test_a_body_whose_framing_breaks_ends_at_once(gateway: Gateway, upstream: Upstream) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("some text")
        await wire.head()
        await wire.chunk()
        exchange.write(b"zz\r\nno size\r\n")
        exchange.hang_up()
        rest = b""
        while chunk := await wire.chunk():
            rest += chunk
    assert b'"code":"upstream_truncated"' in rest
    assert (await gateway.row()).settled.outcome is Outcome.TRUNCATED
    await until(lambda: gateway.services.fleet.record("standard", "standard-0").in_flight == 0)


async def test_raw_bytes_are_an_answer_too(gateway: Gateway, upstream: Upstream) -> None:
    metadata = '{"usage":{"prompt_tokens":7}}'

    def write(exchange: Exchange) -> None:
        exchange.respond(200, b"\x00\x01\xff", "application/octet-stream", f"metadata: {metadata}")

    upstream.default = plays(write)
    got = await gateway.post({"model": "m", "input": "x", "encoding_format": "bytes"}, "/v1/embeddings")
    assert (got.status, got.body, got.header("metadata")) == (200, b"\x00\x01\xff", metadata)
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.COMPLETED
    assert settled.usage.prompt == 7


async def test_a_refusal_inside_a_stream_costs_nothing(gateway: Gateway, upstream: Upstream) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.event({"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}})
        exchange.done()

    upstream.default = plays(write)
    answer = await gateway.post(STREAM)
    assert answer.documents[-1]["error"]["message"] == "bad"
    settled = (await gateway.row()).settled
    assert (settled.outcome, settled.charge.total) == (Outcome.REJECTED, 0)
