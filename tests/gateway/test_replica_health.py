"""Replicas' health in a running gateway: what requests and probes do to it, and what no client may do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits
from ctxgate.inference.probe import probe
from ctxgate.routing.health import COOL_DOWN_US, Health
from support.behaviours import plays, refuses, vllm_error
from support.gateway import HELLO, STREAM, until
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


def conversation(number: int) -> dict[str, Any]:
    """The first request of a conversation of its own."""
    return HELLO | {"messages": [{"role": "user", "content": f"conversation {number}"}]}


async def pools(gateway: Gateway) -> dict[str, int]:
    """What /ready says of the only pool."""
    found: dict[str, int] = (await gateway.get("/ready", ())).document["pools"]["standard"]
    return found


async def test_a_poisonous_conversation_takes_no_replica_from_the_others(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    for server in (upstream, other_upstream):
        server.default = refuses(500, vllm_error("boom", "InternalServerError", 500))
    for _ in range(10):
        assert (await gateway.post(HELLO)).status == 500
    assert [record.health.failures for record in gateway.services.fleet.records()] == [1, 1]
    assert (await pools(gateway))["healthy"] == 2


@pytest.mark.parametrize("code", [400, 422, 501])
@pytest.mark.parametrize("surface", ["status", "stream", "whole"])
async def test_what_the_engine_will_not_do_for_a_client_says_nothing_of_the_replica(
    gateway: Gateway, upstream: Upstream, surface: str, code: int
) -> None:
    document = vllm_error("bad regex", "BadRequestError", code)

    def in_a_stream(exchange: Exchange) -> None:
        exchange.head()
        exchange.event(document)
        exchange.done()

    upstream.default = {
        "status": refuses(code, document),
        "whole": refuses(200, document),
        "stream": plays(in_a_stream),
    }[surface]
    (record,) = gateway.services.fleet.records()
    await until(lambda: record.windows)
    for number in range(6):
        await gateway.post(conversation(number) | {"stream": surface == "stream"})
    assert record.health == Health()


async def test_a_refusal_does_not_make_earlier_failures_undone(gateway: Gateway, upstream: Upstream) -> None:
    (record,) = gateway.services.fleet.records()
    for number in range(2):
        upstream.play(refuses(500, b"{}"), refuses(400, vllm_error("bad", "BadRequestError", 400)))
        await gateway.post(conversation(number))
        await gateway.post(HELLO)
    assert record.health.failures == 2
    await gateway.post(HELLO)
    assert record.health.failures == 0


async def test_the_gateways_own_deadline_is_no_failure_of_the_replica(
    upstream: Upstream, start_gateway: Start
) -> None:
    limits = Limits(first_byte_timeout_s=0.02, abort_drain_s=0.02)
    gateway = await start_gateway(upstream, limits=limits)
    upstream.default = by_hand
    for _ in range(6):
        assert (await gateway.post(HELLO)).status == 504
    (record,) = gateway.services.fleet.records()
    assert record.health.failures == 0
    assert (await pools(gateway))["healthy"] == 1
    await gateway.quiet()


async def test_half_open_a_crowd_sends_one_request_to_the_failing_replica(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    fleet = gateway.services.fleet
    now = [fleet.clock()]
    fleet.clock = lambda: now[0]
    upstream.default = refuses(500, b"{}")
    for number in range(40):
        assert (await gateway.post(conversation(number))).status == 200
    assert len(upstream.calls) == 3
    now[0] += COOL_DOWN_US
    upstream.default = by_hand
    crowd = [asyncio.create_task(gateway.post(conversation(number))) for number in range(100, 140)]
    trial = await upstream.next_call()
    await until(lambda: sum(task.done() for task in crowd) == 39)
    trial.answer()
    assert {answer.status for answer in await asyncio.gather(*crowd)} == {200}
    assert len(upstream.calls) == 4
    record = fleet.record("standard", "standard-0")
    await gateway.quiet()
    assert record.health == Health()


async def test_a_replica_that_was_gone_is_ready_as_soon_as_a_probe_finds_it_back(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.replica_watch.PROBE_EVERY_S", 0.005)
    gateway = await start_gateway(upstream)
    (record,) = gateway.services.fleet.records()
    now = gateway.services.fleet.clock()
    gateway.services.fleet.clock = lambda: now  # no cool-down ever ends
    await upstream.stop()
    await until(lambda: not record.health.probe_ok)
    for _ in range(3):
        assert (await gateway.post(HELLO)).status == 502
    assert record.health.open_until_us == now + COOL_DOWN_US
    assert (await pools(gateway))["healthy"] == 0
    await upstream.start()
    await until(lambda: record.health.probe_ok)
    assert (await pools(gateway))["healthy"] == 1
    assert (await gateway.post(STREAM)).status == 200


async def test_a_probe_that_fails_by_a_defect_is_logged_and_the_probing_goes_on(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = {upstream.url: 3}

    async def sometimes(client: Any, url: str, *rest: Any) -> Any:
        if broken.get(url):
            broken[url] -= 1
            raise LookupError("unknown encoding")
        return await probe(client, url, *rest)

    monkeypatch.setattr("ctxgate.gateway.replica_watch.probe", sometimes)
    monkeypatch.setattr("ctxgate.gateway.replica_watch.PROBE_EVERY_S", 0.005)
    gateway = await start_gateway(upstream, other_upstream)
    await until(lambda: upstream.probes > 1 and other_upstream.probes > 1)
    logged = [record.getMessage() for record in caplog.records if record.exc_info]
    assert logged == ["probing replica standard/standard-0 failed"] * 3
    upstream.default = ok
    assert (await gateway.post(HELLO)).status == 200
