"""Which replicas may serve a request at all, and predictions at the edge of what can be booked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.pipeline import MOST_US, microseconds
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe
from ctxgate.routing.snapshot import Speed
from support.behaviours import plays
from support.gateway import HELLO, STREAM, Gateway, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

QUICK = Speed(1e-6, 0.0, 0.001, 0.0, 0.0, base_s=0.01)
SLOW = Speed(1e-6, 0.0, 0.01, 0.0, 0.0, base_s=2.0)


@pytest.fixture
async def pools(upstream: Upstream, other_upstream: Upstream, start_gateway: Start) -> Gateway:
    """A slow standard pool at one server, a fast one of twice the price at the other."""
    return await start_gateway(
        upstream, fast=[other_upstream.url], pool={"speed": SLOW}, fast_pool={"speed": QUICK}
    )


async def test_a_prompt_that_may_go_anywhere_is_kept_apart_as_the_strictest_pool_demands(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(
        upstream,
        fast=[other_upstream.url],
        pool={"cache_isolation": "none"},
        fast_pool={"cache_isolation": "team", "continuous_usage": True},
    )
    await gateway.post(STREAM | {"service_tier": "flex"})
    (call,) = (*upstream.calls, *other_upstream.calls)
    assert call.document["cache_salt"]
    assert call.document["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_with_one_pool_and_nothing_known_the_conversations_root_decides(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    again = await start_gateway(upstream, other_upstream)
    places = []
    for number in range(12):
        body = HELLO | {"messages": [{"role": "user", "content": f"conversation {number}"}]}
        one, two = await gateway.post(body), await again.post(body)
        places.append((one.header("x-ctxgate-replica"), two.header("x-ctxgate-replica")))
    assert all(one == two for one, two in places)
    assert len({one for one, _ in places}) == 2


async def test_a_pool_whose_window_is_too_short_serves_only_where_none_is_longer(
    pools: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    fleet = pools.services.fleet
    await until(lambda: all(record.windows for record in fleet.records()))
    fleet.probed("standard", "standard-0", Probe(Finding.WELL, {"m": 32}))
    answer = await pools.post(HELLO | {"service_tier": "flex"})
    assert answer.header("x-ctxgate-pool") == "fast"
    kept = pools.services.routing.decisions.of(answer.header("x-request-id"), "acme", "alpha")
    assert kept is not None
    assert [one["excluded"] for one in kept[0]["candidates"]] == [None, "window"]
    fleet.probed("fast", "fast-0", Probe(Finding.WELL, {"m": 16}))
    assert (await pools.post(HELLO)).status == 200


async def test_a_replica_that_drains_gets_nothing_new_though_it_is_the_only_one(gateway: Gateway) -> None:
    gateway.services.fleet.record("standard", "standard-0").draining = True
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.header("retry-after")) == (503, "5")
    assert answer.error == {
        "message": "The model's servers are being drained and take nothing new.",
        "type": "server_error",
        "param": None,
        "code": "pool_draining",
    }
    assert await gateway.rows() == []


async def test_a_pool_that_drains_is_left_for_another_one_that_the_model_may_use(pools: Gateway) -> None:
    fleet = pools.services.fleet
    for preferred, other in (("fast", "standard"), ("standard", "fast")):
        for record in fleet.records():
            record.draining = record.pool.name == preferred
        for tier in ("priority", "flex"):
            answer = await pools.post(HELLO | {"service_tier": tier})
            assert (answer.status, answer.header("x-ctxgate-pool")) == (200, other)
    for record in fleet.records():
        record.draining = True
    assert (await pools.post(STREAM)).error["code"] == "pool_draining"


async def test_a_failed_attempt_with_only_draining_replicas_left_is_told_as_what_failed(
    pools: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    """What drains was never asked: the client is told what the one that was asked has said."""
    pools.services.fleet.record("fast", "fast-0").draining = True
    upstream.default = plays(lambda exchange: exchange.respond(503, b"{}"))
    answer = await pools.post(HELLO)
    assert (answer.status, answer.error["code"]) == (429, "server_is_overloaded")
    assert other_upstream.calls == []


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [(None, None), (1.5, 1_500_000), (-0.25, 0), (float("inf"), None), (float("nan"), None), (1e30, MOST_US)],
)
def test_a_predicted_time_is_one_that_the_ledger_takes(seconds: float | None, kept: int | None) -> None:
    assert microseconds(seconds) == kept


async def test_a_margin_below_zero_loses_no_row(upstream: Upstream, start_gateway: Start) -> None:
    early = Speed(1e-6, 0.0, 0.001, 0.0, 0.0, rho_s=-5.0)
    gateway = await start_gateway(upstream, pool={"speed": early})
    gateway.services.routing.speed_of = lambda _: early
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.header("x-ctxgate-predicted-ttft-ms")) == (200, "0")
    assert (await gateway.row()).opened.predicted_ttft_us == 0
