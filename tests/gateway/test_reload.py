"""A changed configuration is taken over while requests run: replicas come, drain and go, keys are revoked."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits, Listen
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.per_replica import for_each
from ctxgate.gateway.reload import take_over
from ctxgate.routing.health import THRESHOLD
from ctxgate.routing.snapshot import Knowledge
from support.gateway import ALPHA, HELLO, STREAM, bearer, until
from support.serving import configuration, serving
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from ctxgate.gateway.config import Config, Replica
    from ctxgate.gateway.context_turn import Shaped
    from ctxgate.gateway.fleet import ReplicaRecord
    from support.client import Wire
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


def with_replicas(config: Config, *replicas: Replica) -> Config:
    """The configuration with these replicas in its one pool."""
    (pool,) = config.pools.values()
    return replace(config, pools={pool.name: replace(pool, replicas=replicas)})


async def place_of(gateway: Gateway) -> str:
    answer = await gateway.post(HELLO)
    assert answer.status == 200
    return answer.header("x-ctxgate-replica")


async def streaming(wire: Wire, upstream: Upstream) -> Exchange:
    """A stream that has begun, its first text at the client."""
    upstream.play(by_hand)
    wire.request(body=STREAM, headers=[bearer()])
    exchange = await upstream.next_call()
    exchange.head()
    exchange.text("some text")
    await wire.head()
    await wire.chunk()
    return exchange


async def end_of(wire: Wire, exchange: Exchange) -> bytes:
    exchange.chunk({}, "stop")
    exchange.usage_chunk(completion=7)
    exchange.done()
    rest = b""
    while chunk := await wire.chunk():
        rest += chunk
    return rest


async def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    first, second = gateway.application.config.pools["standard"].replicas
    busy = {first.url: upstream, second.url: other_upstream}
    home = first if await place_of(gateway) == first.name else second
    left = second if home is first else first
    async with gateway.wire() as wire:
        exchange = await streaming(wire, busy[home.url])
        config = with_replicas(gateway.application.config, replace(home, draining=True), left)
        assert take_over(gateway.application, config) == ()
        assert [await place_of(gateway) for _ in range(3)] == [left.name] * 3
        assert b"[DONE]" in await end_of(wire, exchange)
    rows = await gateway.rows()
    assert [row.settled.outcome for row in rows] == [Outcome.COMPLETED] * 5
    await gateway.quiet()
    take_over(gateway.application, with_replicas(gateway.application.config, home, left))
    assert await place_of(gateway) == home.name


async def test_a_replica_that_is_gone_from_the_file_ends_its_stream_and_is_forgotten(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    (old,) = gateway.application.config.pools["standard"].replicas
    new = replace(old, name="new", url=other_upstream.url)
    async with gateway.wire() as wire:
        exchange = await streaming(wire, upstream)
        take_over(gateway.application, with_replicas(gateway.application.config, new))
        assert await place_of(gateway) == "new"
        assert [record.replica.name for record in gateway.services.fleet.records()] == ["new"]
        assert b"[DONE]" in await end_of(wire, exchange)
    row = next(row for row in await gateway.rows() if row.opened.replica == old.name)
    assert row.settled.usage.output.value == 7
    metrics = await gateway.metrics()
    assert 'ctxgate_in_flight{pool="standard",replica="new"}' in metrics
    assert f'ctxgate_in_flight{{pool="standard",replica="{old.name}"}}' not in metrics


async def test_a_replica_of_the_same_name_elsewhere_is_another_one(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    (old,) = gateway.application.config.pools["standard"].replicas
    fleet = gateway.services.fleet
    record = fleet.record("standard", old.name)
    take_over(gateway.application, gateway.application.config)
    assert fleet.record("standard", old.name) is record  # what is known of it stays
    moved = replace(old, url=other_upstream.url)
    take_over(gateway.application, with_replicas(gateway.application.config, moved))
    assert fleet.record("standard", old.name) is not record
    other_upstream.play(by_hand)
    asking = asyncio.create_task(gateway.post(HELLO))
    exchange = await other_upstream.next_call()
    exchange.answer()
    assert (await asking).status == 200


async def test_a_revoked_key_opens_nothing_more_and_its_stream_goes_on(
    gateway: Gateway, upstream: Upstream
) -> None:
    config = gateway.application.config
    async with gateway.wire() as wire:
        exchange = await streaming(wire, upstream)
        keys = tuple(key for key in config.keys if key.key_id != "alpha-ci")
        take_over(gateway.application, replace(config, keys=keys))
        assert (await gateway.post(HELLO)).status == 401
        assert b"[DONE]" in await end_of(wire, exchange)
    take_over(gateway.application, config)
    assert (await gateway.post(HELLO)).status == 200
    assert (await gateway.metrics())["ctxgate_config_generation"] == 3


async def test_what_is_read_at_start_waits_and_limits_do_not(gateway: Gateway, tmp_path: Path) -> None:
    old = gateway.application.config
    changed = replace(
        old, listen=Listen("127.0.0.1", 1), store=tmp_path / "b.db", limits=Limits(max_body_bytes=10)
    )
    assert take_over(gateway.application, changed) == ("listen", "store")
    config = gateway.application.config
    assert (config.listen, config.store) == (old.listen, old.store)
    assert (await gateway.post(HELLO)).status == 413


async def test_the_watch_over_replicas_follows_the_configuration_and_tells_of_its_failures(
    start_gateway: Start, upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    fleet = gateway.services.fleet
    running: set[str] = set()
    broken = asyncio.Event()

    async def run(record: ReplicaRecord) -> None:
        name = record.replica.name
        running.add(name)
        try:
            await broken.wait()
            raise RuntimeError("the watch is broken")
        finally:
            running.discard(name)

    watching = asyncio.create_task(for_each(fleet, run))
    await until(lambda: running == {"standard-0"})
    (old,) = gateway.application.config.pools["standard"].replicas
    new = replace(old, name="new")
    take_over(gateway.application, with_replicas(gateway.application.config, old, new))
    await until(lambda: running == {"standard-0", "new"})
    take_over(gateway.application, with_replicas(gateway.application.config, new))
    await until(lambda: running == {"new"})
    broken.set()
    with pytest.raises(RuntimeError, match="the watch is broken"):
        await watching
    assert not running


async def test_a_hangup_reads_the_file_again_and_a_mistake_changes_nothing(
    tmp_path: Path, upstream: Upstream
) -> None:
    file = configuration(tmp_path, upstream.url)
    good = json.loads(file.read_text())
    async with serving(file) as served:

        def sample(name: str) -> float | None:
            with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics") as answer:
                lines = answer.read().decode().splitlines()
            found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
            return float(found[0]) if found else None

        async def comes(name: str, value: float) -> None:
            while await asyncio.to_thread(sample, name) != value:
                pass

        await asyncio.wait_for(comes("ctxgate_config_generation", 1), 20)
        file.write_text(json.dumps(good | {"surprise": 1}))
        served.process.send_signal(signal.SIGHUP)
        await asyncio.wait_for(comes('ctxgate_config_reloads_total{outcome="refused"}', 1), 20)
        assert await asyncio.to_thread(sample, "ctxgate_config_generation") == 1
        file.write_text(json.dumps(good | {"keys": good["keys"][1:]}))  # alpha's key is gone
        served.process.send_signal(signal.SIGHUP)
        await asyncio.wait_for(comes("ctxgate_config_generation", 2), 20)

        def status() -> int:
            request = urllib.request.Request(
                f"http://127.0.0.1:{served.port}/v1/models", headers={"authorization": f"Bearer {ALPHA}"}
            )
            try:
                with urllib.request.urlopen(request) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert await asyncio.to_thread(status) == 401
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0


def reloading(gateway: Gateway, *configs: Config) -> None:
    """Take these configurations over while the next request is planned."""
    shape, left = gateway.services.context.shape, list(configs)

    async def meanwhile(*args: Any, **options: Any) -> Shaped:
        while left:
            take_over(gateway.application, left.pop(0))
        return await shape(*args, **options)

    gateway.services.context.shape = meanwhile  # type: ignore[method-assign]  # a step between


async def test_a_request_whose_only_replica_goes_while_it_is_planned_goes_to_the_new_one(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    (old,) = gateway.application.config.pools["standard"].replicas
    names = ["new", "newer", "newest"]
    configs = [
        with_replicas(gateway.application.config, replace(old, name=name, url=other_upstream.url))
        for name in names
    ]
    reloading(gateway, configs[0])
    answer = await gateway.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "60000")])
    assert (answer.status, answer.header("x-ctxgate-replica")) == (200, "new")
    reloading(gateway, *configs[1:])
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.header("x-ctxgate-replica")) == (200, "newest")


async def test_a_request_all_of_whose_replicas_go_while_it_is_planned_goes_to_a_new_one(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    config = gateway.application.config
    first, second = config.pools["standard"].replicas
    reloading(gateway, with_replicas(config, replace(first, name="x"), replace(second, name="y")))
    assert await place_of(gateway) in ("x", "y")


async def test_what_breaks_at_a_replicas_old_address_is_not_held_against_the_new_one(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    (old,) = gateway.application.config.pools["standard"].replicas
    async with AsyncExitStack() as stack:
        exchanges: list[Exchange] = []
        for number in range(THRESHOLD):
            wire = await stack.enter_async_context(gateway.wire())
            upstream.play(by_hand)
            messages = [{"role": "user", "content": f"hello {number}"}]
            wire.request(body=STREAM | {"messages": messages}, headers=[bearer()])
            exchanges.append(await upstream.next_call())
            exchanges[-1].head()
            exchanges[-1].text("some text")
            await wire.head()
            await wire.chunk()
        moved = with_replicas(gateway.application.config, replace(old, url=other_upstream.url))
        take_over(gateway.application, moved)
        for exchange in exchanges:
            exchange.reset()
        await gateway.quiet()
    (record,) = gateway.services.fleet.records()
    assert record.replica.url == other_upstream.url
    assert record.health.failures == 0


async def test_what_ends_at_a_replicas_old_address_is_not_expected_in_the_cache_of_the_new_one(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream)
    (old,) = gateway.application.config.pools["standard"].replicas
    long = {"role": "user", "content": "w " * 20_000}
    async with gateway.wire() as wire:
        upstream.play(by_hand)
        wire.request(body=STREAM | {"messages": [long]}, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("some text")
        await wire.head()
        await wire.chunk()
        moved = with_replicas(gateway.application.config, replace(old, url=other_upstream.url))
        take_over(gateway.application, moved)
        exchange.chunk({}, "stop")
        exchange.usage_chunk(prompt=20_000, cached=0, completion=7)
        exchange.done()
        while await wire.chunk():
            pass
    await gateway.quiet()
    place = ("standard", old.name)
    assert gateway.services.misses.index.links == 0
    assert gateway.services.misses.index.knowledge(place) is Knowledge.COLD
    more = [long, {"role": "assistant", "content": "some text"}, {"role": "user", "content": "more"}]
    answer = await gateway.post(HELLO | {"messages": more})
    assert answer.status == 200
    assert answer.header("x-ctxgate-expected-cached") in ("", "0")


async def test_a_call_gives_way_also_where_another_replica_is_gone(
    start_gateway: Start, upstream: Upstream, other_upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    replicas = {one.url: one for one in gateway.application.config.pools["standard"].replicas}
    home = await place_of(gateway)
    busy = next(one for one in (upstream, other_upstream) if replicas[one.url].name == home)
    busy.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=HELLO, headers=[bearer()])
        exchange = await busy.next_call()
        for _ in range(2):  # what was gone by the first one is forgotten by the second
            take_over(gateway.application, with_replicas(gateway.application.config, replicas[busy.url]))
        (attempt,) = gateway.services.attempts
        attempt.give_way(gateway.services.fleet.record("standard", home))  # there is no other: it stays
        exchange.answer()
        assert (await wire.head()).status == 200
