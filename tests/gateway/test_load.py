"""The load of replicas: counted at the decision, given back exactly once on every way out."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Pool, Replica
from ctxgate.gateway.fleet import LOAD_COUNTS_US, Fleet
from ctxgate.gateway.flow import PATHS, Surface
from ctxgate.inference.engine_load import EngineLoad
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe
from ctxgate.inference.rates import RateCard
from ctxgate.routing.snapshot import Speed, Work
from support.behaviours import RESET, dies_after
from support.gateway import HELLO, MODEL, RATES, STREAM, bearer, until
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.gateway.fleet import ReplicaRecord
    from support.client import Wire
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

BODIES: dict[Surface, dict[str, Any]] = {
    Surface.CHAT: HELLO,
    Surface.COMPLETIONS: {"model": MODEL, "prompt": "hello"},
    Surface.EMBEDDINGS: {"model": MODEL, "input": "hello"},
}
WAYS = [
    (path, surface, stream)
    for path, surface in PATHS.items()
    for stream in ((False,) if surface is Surface.EMBEDDINGS else (False, True))
]


def load(record: ReplicaRecord) -> tuple[int, int, int, int, int]:
    """Open attempts, tokens and pairs to prefill, attempts that decode, their tokens."""
    return (
        record.in_flight,
        record.prefill_tokens,
        record.prefill_pairs,
        record.decoding,
        record.context_tokens,
    )


def the_record(gateway: Gateway) -> ReplicaRecord:
    return gateway.services.fleet.record("standard", "standard-0")


@pytest.mark.parametrize(("path", "surface", "stream"), WAYS)
async def test_routing_a1_a2_every_route_takes_and_returns_the_same_load(
    gateway: Gateway, upstream: Upstream, path: str, surface: Surface, stream: bool
) -> None:
    body = BODIES[surface] | ({"stream": True} if stream else {})
    upstream.play(by_hand)
    record = the_record(gateway)
    async with gateway.wire() as wire:
        wire.request(path, body, [bearer()])
        exchange = await upstream.next_call()
        tokens = (await _opened(gateway)).estimated_prompt_tokens
        assert load(record) == (1, tokens, tokens * tokens // 2, 0, 0)
        if stream:
            exchange.head()
            exchange.text("a ")
            await wire.head()
            await wire.chunk()
            assert load(record) == (1, 0, 0, 1, tokens)
            exchange.chunk({}, "stop")
            exchange.usage_chunk()
            exchange.done()
        else:
            exchange.answer()
        await gateway.quiet()
    assert load(record) == (0, 0, 0, 0, 0)


async def _opened(gateway: Gateway) -> Any:
    """The only open attempt, as the ledger knows it."""
    (attempt,) = gateway.services.attempts
    return attempt._row


def test_routing_a1_the_bodies_above_cover_all_surfaces() -> None:
    assert {surface for _, surface, _ in WAYS} == {*Surface} == {*BODIES}


async def test_routing_a4_probes_in_the_middle_of_streams_change_no_count(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.default = by_hand
    record, fleet = the_record(gateway), gateway.services.fleet
    wires = [gateway.wire() for _ in range(3)]
    entered = [await each.__aenter__() for each in wires]
    exchanges: list[Exchange] = []
    for wire in entered:
        wire.request(body=STREAM, headers=[bearer()])
        exchanges.append(await upstream.next_call())
    before = load(record)
    for finding in (Finding.WELL, Finding.UNWELL, Finding.REFUSED, Finding.SILENT) * 5:
        fleet.probed("standard", "standard-0", Probe(finding, {MODEL: 10}))
        fleet.told_load("standard", "standard-0", EngineLoad(7, 8, 0.5, 9))
    assert load(record) == before
    assert before[0] == 3
    for exchange in exchanges:
        exchange.head()
        exchange.chunk({}, "stop")
        exchange.done()
    for each in wires:
        await each.__aexit__(None, None, None)
    await gateway.quiet()
    assert load(record) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_routing_a5_clients_that_leave_anywhere_leave_no_load(
    gateway: Gateway, upstream: Upstream, seed: int
) -> None:
    """Before the headers, before the first byte, in the middle, at the end; also where a replica breaks."""
    rng = random.Random(seed)
    upstream.default = by_hand
    record = the_record(gateway)

    async def client(number: int) -> None:
        async with gateway.wire() as wire:
            wire.request(body=STREAM if number % 3 else HELLO, headers=[bearer()])
            await _play(await upstream.next_call(), wire, rng.randrange(6), rng)

    for number in range(12):
        await client(number)
    await gateway.quiet()
    assert load(record) == (0, 0, 0, 0, 0)
    assert all(value >= 0 for value in load(record))


async def _play(exchange: Exchange, wire: Wire, step: int, rng: random.Random) -> None:
    """Let the exchange come to a point, and leave there."""
    if exchange.streams and step > 0:
        exchange.head()
        for _ in range(step - 1):
            exchange.text("a ")
        await wire.head()
        if step == 5:
            exchange.chunk({}, "stop")
            exchange.usage_chunk()
            exchange.done()
    elif not exchange.streams and step > 3:
        exchange.answer()
    if rng.random() < 0.5:
        wire.reset()
    else:
        await wire.close()
    if not exchange.finished.is_set():
        await exchange.until_left()
        exchange.reset()


@pytest.mark.parametrize("behaviour", [RESET, dies_after(0, "reset"), dies_after(2, "hang_up")])
async def test_a_replica_that_breaks_leaves_no_load(
    gateway: Gateway, upstream: Upstream, behaviour: Any
) -> None:
    upstream.default = behaviour
    for body in (HELLO, STREAM):
        await gateway.post(body)
    await gateway.quiet()
    assert load(the_record(gateway)) == (0, 0, 0, 0, 0)


async def test_an_answer_in_one_piece_decodes_from_when_that_was_predicted(
    upstream: Upstream, start_gateway: Start
) -> None:
    speed = Speed(1e-9, 0.0, 0.001, 0.0, 0.0, base_s=0.001)
    gateway = await start_gateway(upstream, pool={"speed": speed})
    upstream.play(by_hand)
    record = the_record(gateway)
    async with gateway.wire() as wire:
        wire.request(body=HELLO, headers=[bearer()])
        exchange = await upstream.next_call()
        await until(lambda: record.decoding)
        tokens = (await _opened(gateway)).estimated_prompt_tokens
        assert load(record) == (1, 0, 0, 1, tokens)
        exchange.answer()
        await wire.answer()
    await gateway.quiet()
    assert load(record) == (0, 0, 0, 0, 0)


async def test_routing_f11_what_is_expected_in_the_cache_is_no_work(
    gateway: Gateway, upstream: Upstream
) -> None:
    await gateway.post(HELLO)
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=HELLO, headers=[bearer()])
        exchange = await upstream.next_call()
        row = await _opened(gateway)
        expected, tokens = row.predicted_cached_tokens, row.estimated_prompt_tokens
        assert expected == 32
        assert the_record(gateway).prefill_tokens == tokens - 32
        exchange.answer()
        await wire.answer()


# ---- what engines tell -------------------------------------------------------------------------------


async def test_the_load_is_read_from_the_metrics_at_the_probes(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.metrics = (
        b'vllm:num_requests_running{engine="0"} 4.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:cache_config_info{kv_cache_size_tokens="640"} 1.0\n'
    )
    gateway = await start_gateway(upstream, pool={"load": "metrics"})
    record = the_record(gateway)
    await until(lambda: record.load)
    (state,) = gateway.services.fleet.snapshot(gateway.services.config.pools.values())
    assert state.work == Work(running=4, waiting=2, kv_usage=0.5)
    assert state.kv_tokens == 640


async def test_a_replica_without_metrics_is_as_well_as_before(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, pool={"load": "metrics"})
    await until(lambda: upstream.probes >= 1)
    assert (await gateway.post(HELLO)).status == 200
    assert the_record(gateway).load is None
    assert gateway.services.fleet.healthy(the_record(gateway))


async def test_the_load_is_read_from_each_answer_where_the_pool_says_so(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, pool={"load": "header"})
    told = 'endpoint-load-metrics: JSON {"named_metrics": {"num_requests_waiting": 3.0}}'

    async def tells(exchange: Exchange) -> None:
        await asyncio.sleep(0)
        exchange.respond(200, b"{}", "application/json", told)

    upstream.play(tells)
    await gateway.post(HELLO)
    assert upstream.calls[0].header("endpoint-load-metrics-format") == "json"
    assert the_record(gateway).load == EngineLoad(waiting=3)


@pytest.mark.parametrize("body", [STREAM, {"model": MODEL, "prompt": "hello", "stream": True}])
async def test_the_load_is_asked_for_and_read_beside_a_stream_too(
    upstream: Upstream, start_gateway: Start, body: dict[str, Any]
) -> None:
    """vLLM tells nothing there, another engine may; what was told before stays where nothing is."""
    gateway = await start_gateway(upstream, pool={"load": "header"})
    told = 'endpoint-load-metrics: JSON {"named_metrics": {"num_requests_waiting": 3.0}}'
    path = next(
        path for path, surface in PATHS.items() if (surface is Surface.COMPLETIONS) == ("prompt" in body)
    )
    for head in ((told,), ()):
        upstream.play(by_hand)
        async with gateway.wire() as wire:
            wire.request(path, body, headers=[bearer()])
            exchange = await upstream.next_call()
            assert exchange.header("endpoint-load-metrics-format") == "json"
            exchange.head(200, "text/event-stream", *head)
            await wire.head()
            exchange.text("a")
            exchange.chunk({}, "stop")
            exchange.usage_chunk()
            exchange.done()
            while await wire.chunk():
                pass
        assert the_record(gateway).load == EngineLoad(waiting=3)


@pytest.mark.parametrize("source", ["header", "metrics"])
def test_a_load_of_which_nothing_more_is_heard_counts_no_longer(source: str) -> None:
    """Else a replica that once told of a queue would be left alone, and so never tell of another."""
    now = [5_000_000]
    pool = Pool("p", (Replica("r", "http://r"),), RateCard(((RATES,),)), load=source)
    fleet = Fleet({"p": pool}, lambda: now[0])
    fleet.told_load("p", "r", EngineLoad(1, 2, 0.5, 640))
    now[0] += LOAD_COUNTS_US
    fleet.probed("p", "r", Probe(Finding.WELL))
    fleet.told_load("p", "r", EngineLoad(waiting=4))
    now[0] += LOAD_COUNTS_US
    fleet.probed("p", "r", Probe(Finding.WELL))
    assert fleet.record("p", "r").work() == Work(running=1, waiting=4, kv_usage=0.5)
    now[0] += 1
    fleet.probed("p", "r", Probe(Finding.WELL))
    assert fleet.record("p", "r").work() == Work()
    assert fleet.record("p", "r").load == EngineLoad(kv_tokens=640)  # its size is what it was


async def test_no_client_can_ask_for_an_engines_load(gateway: Gateway, upstream: Upstream) -> None:
    await gateway.post(HELLO, headers=[bearer(), ("endpoint-load-metrics-format", "json")])
    assert upstream.calls[0].header("endpoint-load-metrics-format") == ""


def test_an_engine_that_went_down_has_no_load_any_more() -> None:
    pool = Pool("p", (Replica("r", "http://r"),), RateCard(((RATES,),)))
    fleet = Fleet({"p": pool}, lambda: 0)
    fleet.told_load("p", "r", EngineLoad(1, 2, 0.5, 640))
    fleet.told_load("p", "r", EngineLoad(waiting=0))
    assert fleet.record("p", "r").load == EngineLoad(1, 0, 0.5, 640)
    fleet.probed("p", "r", Probe(Finding.REFUSED))
    assert fleet.record("p", "r").load is None
