"""The application under load: nothing waits for anything else, nothing is left behind, nothing grows."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import Outcome
from support.behaviours import streams_until_aborted, until_aborted
from support.client import CHAT
from support.gateway import HELLO, MODEL, STREAM, bearer, until
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

pytestmark = pytest.mark.integration


async def test_gateways_k1_requests_do_not_queue_behind_each_other(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.default = by_hand
    requests = [asyncio.create_task(gateway.post(HELLO)) for _ in range(100)]
    exchanges = [await upstream.next_call() for _ in requests]  # all are there before any is answered
    metrics = await gateway.metrics()
    assert metrics['ctxgate_in_flight{pool="standard",replica="standard-0"}'] == 100
    assert metrics["ctxgate_open_requests"] == 100
    for exchange in reversed(exchanges):
        exchange.answer()
    assert {answer.status for answer in await asyncio.gather(*requests)} == {200}
    await gateway.quiet()
    assert (await gateway.metrics())["ctxgate_open_requests"] == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "aborts"),
    [
        (CHAT, HELLO, True),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}, True),
        ("/v1/embeddings", {"model": MODEL, "input": "x"}, False),
    ],
)
async def test_gateways_c2_a_disconnect_on_every_endpoint_is_booked_and_ends_the_call(
    gateway: Gateway, upstream: Upstream, path: str, body: dict[str, Any], aborts: bool, stream: bool
) -> None:
    if stream and not aborts:
        return
    upstream.play(until_aborted)
    async with gateway.wire() as wire:
        wire.request(path, body | ({"stream": True} if stream else {}), [bearer()])
        await until(lambda: upstream.calls)
    (call,) = upstream.calls
    await until(lambda: call.aborted.is_set() if aborts else call.closed.is_set())
    await gateway.quiet()
    assert bool(upstream.abort_calls) is aborts
    row = await gateway.row()
    assert row.settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert row.settled.charge.total == (0 if aborts else row.settled.charge.uncached)


class Clock:
    """Unix microseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_796_040_000_000_000

    def __call__(self) -> int:
        return self.now

    def passes(self, milliseconds: int) -> None:
        """Let time pass."""
        self.now += milliseconds * 1000


@pytest.mark.parametrize("tokens", [1, 50])
async def test_gateways_k4_time_to_first_token_and_duration_are_figures_of_their_own(
    gateway: Gateway, upstream: Upstream, tokens: int
) -> None:
    clock = gateway.services.steady_us = Clock()
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        clock.passes(70)
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})  # no token yet
        await wire.head()
        await wire.chunk()
        clock.passes(30)
        for _ in range(tokens):
            exchange.text("x")
            await wire.chunk()
            clock.passes(20)
        exchange.chunk({}, "stop")
        exchange.usage_chunk(completion=tokens)
        exchange.done()
        while await wire.chunk():
            pass
    settled = (await gateway.row()).settled
    assert settled.ttft_us == 100_000  # whatever the length of the answer
    assert settled.total_us == 100_000 + tokens * 20_000
    metrics = await gateway.metrics()
    assert metrics['ctxgate_ttft_seconds_sum{model="m",pool="standard"}'] == 0.1
    assert metrics['ctxgate_attempt_seconds_sum{model="m",pool="standard"}'] == pytest.approx(
        0.1 + tokens * 0.02
    )


def kinds() -> Counter[str]:
    """Live objects of the gateway's and its libraries' per-request kinds."""
    wanted = ("Attempt", "Reply", "StreamReader", "Body", "Inbound", "ClientResponse", "Task", "Timeout")
    gc.collect()
    return Counter(name for one in gc.get_objects() if (name := type(one).__name__) in wanted)


async def test_gateways_k5_many_requests_a_tenth_of_them_aborted_leave_nothing(
    gateway: Gateway, upstream: Upstream
) -> None:
    endless = streams_until_aborted("a ", "b ")

    async def leave_one() -> None:
        async with gateway.wire() as leaving:
            calls = len(upstream.calls)
            leaving.request(body=STREAM, headers=[bearer()])
            await until(lambda: len(upstream.calls) > calls)

    async def batch(count: int) -> None:
        async with gateway.wire() as wire:
            for number in range(count):
                if number % 10 == 9:
                    upstream.play(endless)
                    await leave_one()
                    continue
                wire.request(body=STREAM if number % 2 else HELLO, headers=[bearer()])
                assert (await wire.answer()).status == 200
        await gateway.quiet()
        upstream.calls.clear()
        upstream.abort_calls.clear()

    services = gateway.services
    await batch(100)
    before, tasks, series = kinds(), len(asyncio.all_tasks()), len(await gateway.metrics())
    connections = len(upstream.open)
    for _ in range(4):
        await batch(200)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    after = kinds()
    for name in after:
        assert after[name] <= before[name] + 8, name
    assert len(upstream.open) <= connections + 2
    assert len(await gateway.metrics()) == series
    assert len(gateway.state.connections) <= 2
    assert (len(services.background), services.ledger.pending) == (0, 0)
    rows = await gateway.rows()
    assert len(rows) == 900
    outcomes = Counter(row.settled.outcome for row in rows)
    assert outcomes == {Outcome.COMPLETED: 810, Outcome.CLIENT_DISCONNECTED: 90}


async def test_stopping_waits_for_open_requests_and_settles_them(
    gateway: Gateway, upstream: Upstream, tmp_path: Any
) -> None:
    upstream.play(by_hand)
    ledger = gateway.services.ledger
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        await wire.head()
        stopping = asyncio.create_task(gateway.stop())
        await asyncio.sleep(0)
        exchange.chunk({"content": "x"}, "stop")
        exchange.usage_chunk()
        exchange.done()
        received = b""
        while chunk := await wire.chunk():
            received += chunk
        assert received.endswith(b"data: [DONE]\n\n")
        await stopping
        assert await wire.closed()
    assert ledger.pending == 0


async def test_a_request_that_is_cancelled_at_the_end_of_the_grace_time_is_settled(
    gateway: Gateway, upstream: Upstream
) -> None:
    def begin(exchange: Exchange) -> None:
        exchange.head()
        exchange.text("some text")

    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        begin(exchange)
        await wire.head()
        await wire.chunk()
        for task in gateway.state.tasks:
            task.cancel()  # as uvicorn does
        await until(exchange.closed.is_set)
        await gateway.quiet()
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.SHUTDOWN
    assert settled.usage.output.value == 3  # 9 bytes of text at 4 bytes per token


async def test_attempts_left_open_by_a_dead_process_are_priced_at_the_next_start(
    upstream: Upstream, start_gateway: Any, tmp_path: Any
) -> None:
    from ctxgate.gateway.stores.sqlite import SqliteLedger
    from support.ledgers import opened, price

    store = tmp_path / "ledger.db"
    dead = SqliteLedger(store, price=price)
    await dead.open(opened("left", pool="standard", estimated_prompt_tokens=100, predicted_cached_tokens=80))
    await dead.open(opened("gone", pool="a pool that is no more"))
    await dead.close()  # ends its life without settling
    gateway = await start_gateway(upstream, store=store)
    by_id = {row.opened.attempt_id: row.settled for row in await gateway.rows()}
    assert {settled.outcome for settled in by_id.values()} == {Outcome.CRASHED}
    assert by_id["left"].charge.total == 20 * 1000 + 80 * 100
    assert by_id["gone"].charge.total is None


async def test_the_probe_sets_a_dead_replica_aside_and_takes_it_back(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.replica_watch.PROBE_EVERY_S", 0.005)
    gateway = await start_gateway(upstream, other_upstream)
    records = list(gateway.services.fleet.records())
    upstream.health_status = 503
    await until(lambda: not records[0].health.probe_ok)
    assert records[1].health.probe_ok
    for number in range(10):
        body = HELLO | {"messages": [{"role": "user", "content": f"conversation {number}"}]}
        assert (await gateway.post(body)).status == 200
    assert upstream.calls == []
    upstream.health_status = 200
    await until(lambda: records[0].health.probe_ok)
    # A document that is none, or nested beyond reason, must not end the probing.
    for models in (["no", {"document": 1}], {"data": [None, {"id": 7}, {"id": "m", "max_model_len": "x"}]}):
        upstream.models = models
        upstream.probes = 0
        await until(lambda: upstream.probes > 2)
    upstream.default = ok
    assert (await gateway.post(HELLO)).status == 200
