"""The prefix index of a running gateway: what is under way counts, what failed does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe
from ctxgate.routing.snapshot import Knowledge
from support.behaviours import BUSY, plays
from support.gateway import HELLO, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


async def test_a_prompt_counts_where_it_is_under_way_and_where_it_was_read(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    """One replica refuses it, the other one reads it."""
    gateway = await start_gateway(upstream, fast=[other_upstream.url])
    index = gateway.services.misses.index
    places = [(pool.name, pool.replicas[0].name) for pool in gateway.services.config.pools.values()]
    during: list[set[Knowledge]] = []

    def looks(exchange: Exchange) -> None:
        during.append({index.knowledge(place) for place in places})
        exchange.answer(prompt=320, cached=0, completion=1)

    upstream.play(BUSY)
    other_upstream.play(BUSY)
    first = await gateway.post(HELLO)
    assert first.status != 200
    assert {index.knowledge(place) for place in places} == {Knowledge.COLD}
    upstream.play(plays(looks))
    other_upstream.play(plays(looks))
    answer = await gateway.post(HELLO)
    assert answer.status == 200
    assert during == [{Knowledge.COLD, Knowledge.DEGRADED}]
    served = next(place for place in places if place[0] == answer.header("x-ctxgate-pool"))
    assert [place for place in places if index.knowledge(place) is Knowledge.DEGRADED] == [served]
    assert not index._places[served].ahead.tokens


async def test_a_replica_whose_engine_is_gone_is_cold(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.replica_watch.PROBE_EVERY_S", 0.01)
    gateway = await start_gateway(upstream)
    services = gateway.services
    (record,) = services.fleet.records()
    place = (record.pool.name, record.replica.name)
    await until(lambda: record.health.probe_ok)
    await gateway.post(HELLO)
    assert services.misses.index.knowledge(place) is Knowledge.DEGRADED

    found = Finding.SILENT

    async def tells(*_: object) -> Probe:
        return Probe(found)

    monkeypatch.setattr("ctxgate.gateway.replica_watch.probe", tells)
    await until(lambda: not record.health.probe_ok)
    assert services.misses.index.knowledge(place) is Knowledge.DEGRADED  # it may only be slow
    found = Finding.REFUSED
    await until(lambda: services.misses.index.knowledge(place) is Knowledge.COLD)
