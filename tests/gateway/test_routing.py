"""Two pools of one model: where requests go, what their clients are told, and what is booked of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway import routing
from ctxgate.gateway.config import Replica
from ctxgate.gateway.decisions import Decisions
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.rates import RateCard
from ctxgate.routing.candidates import RouteDecision
from ctxgate.routing.snapshot import LatencyBudget, Speed
from ctxgate.routing.tiers import DEFAULTS, Classes, JobClass
from support.behaviours import BUSY, RESET, plays
from support.gateway import BETA, HELLO, RATES, STREAM, Gateway, bearer, config
from support.missing import answers, send, turn
from support.upstream import event_bytes, ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

QUICK = Speed(1e-6, 0.0, 0.001, 0.0, 0.0, base_s=0.01)
SLOW = Speed(1e-6, 0.0, 0.01, 0.0, 0.0, base_s=2.0)


@pytest.fixture
async def pools(upstream: Upstream, other_upstream: Upstream, start_gateway: Start) -> Gateway:
    """A slow standard pool at one server, a fast one of twice the price at the other."""
    return await start_gateway(
        upstream, fast=[other_upstream.url], pool={"speed": SLOW}, fast_pool={"speed": QUICK}
    )


async def test_the_cheaper_pool_serves_while_it_is_in_time(pools: Gateway) -> None:
    for limit, pool in (("60000", "standard"), ("1000", "fast")):
        answer = await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", limit)])
        assert answer.header("x-ctxgate-pool") == answer.header("x-ctxgate-tier") == pool
        assert answer.header("x-ctxgate-fits") == "true"
    assert 10 <= int(answer.header("x-ctxgate-predicted-ttft-ms")) < 1000


async def test_where_none_is_in_time_the_fastest_serves_and_says_so(pools: Gateway) -> None:
    answer = await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "1")])
    assert (answer.status, answer.header("x-ctxgate-pool")) == (200, "fast")
    assert answer.header("x-ctxgate-fits") == "false"
    row = await pools.row()
    assert (row.opened.fits, row.opened.job_class, row.opened.policy) == (False, "agent", "ctxgate")
    assert row.opened.predicted_ttft_us is not None
    assert row.opened.predicted_ttft_us >= 10_000


async def test_without_a_bound_nothing_is_said_of_keeping_it(pools: Gateway) -> None:
    answer = await pools.post(HELLO)
    assert answer.header("x-ctxgate-fits") == ""
    assert (await pools.row()).opened.fits is None


async def test_a_teams_class_bounds_its_requests(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    bounds = {**DEFAULTS, JobClass.INTERACTIVE: LatencyBudget(ttft_us=1_000_000, source="class")}
    gateway = await start_gateway(
        upstream,
        fast=[other_upstream.url],
        pool={"speed": SLOW},
        fast_pool={"speed": QUICK},
        classes=Classes(JobClass.BATCH, bounds),
    )
    assert (await gateway.post(HELLO)).header("x-ctxgate-pool") == "standard"
    answer = await gateway.post(HELLO, headers=[bearer(), ("x-ctxgate-class", "interactive")])
    assert answer.header("x-ctxgate-pool") == "fast"
    assert [row.opened.job_class for row in await gateway.rows()] == ["batch", "interactive"]


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-ctxgate-class", "fsat"), ("x-ctxgate-ttft-ms", "-1"), ("x-ctxgate-latency-ms", "soon")],
)
async def test_routing_f3_a_header_that_is_not_understood_is_400_and_named(
    pools: Gateway, header: str, value: str
) -> None:
    answer = await pools.post(HELLO, headers=[bearer(), (header, value)])
    assert (answer.status, answer.error["param"]) == (400, header)
    assert header in answer.error["message"]
    assert await pools.rows() == []


# ---- service tiers -----------------------------------------------------------------------------------


@pytest.fixture
async def even(upstream: Upstream, other_upstream: Upstream, start_gateway: Start) -> Gateway:
    """Two pools of one price and no known speed."""
    return await start_gateway(
        upstream, fast=[other_upstream.url], fast_pool={"rates": RateCard(((RATES,),))}
    )


@pytest.mark.parametrize(("tier", "pool"), [("priority", "fast"), ("flex", "standard")])
@pytest.mark.parametrize("stream", [False, True])
async def test_routing_f6_a_service_tier_chooses_between_equals_and_the_answer_reports_it(
    even: Gateway, upstream: Upstream, other_upstream: Upstream, tier: str, pool: str, stream: bool
) -> None:
    answer = await even.post((STREAM if stream else HELLO) | {"service_tier": tier})
    assert answer.header("x-ctxgate-pool") == pool
    (call,) = (*upstream.calls, *other_upstream.calls)
    assert call.document["service_tier"] == tier  # the engine sees what the client sent
    assert "priority" not in call.document  # which an engine may take and ignore
    assert call.header("x-vllm-priority") == ""
    if stream:
        first, *rest = [json.loads(event) for event in answer.events[:-1]]
        assert first["service_tier"] == tier
        assert not any("service_tier" in each for each in rest)
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in (first, *rest)) == "a b c "
    else:
        assert answer.document["service_tier"] == tier
        assert answer.document["choices"][0]["message"]["content"] == "a b c "


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_tier_or_with_an_unknown_one_the_answer_stays_as_it_came(
    even: Gateway, stream: bool
) -> None:
    for more in ({}, {"service_tier": None}, {"service_tier": "scale"}, {"service_tier": 5}):
        answer = await even.post((STREAM if stream else HELLO) | more)
        assert b"service_tier" not in answer.body


async def test_an_engines_own_word_on_the_tier_stands(even: Gateway, other_upstream: Upstream) -> None:
    def says(word: str | None) -> Callable[[Exchange], None]:
        def write(exchange: Exchange) -> None:
            document = {"service_tier": word, **exchange.answer_document()}
            exchange.respond(200, json.dumps(document).encode())

        return write

    other_upstream.play(plays(says("scale")), plays(says(None)))
    told = [(await even.post(HELLO | {"service_tier": "priority"})).document for _ in range(2)]
    assert [each["service_tier"] for each in told] == ["scale", "priority"]


async def test_a_streams_own_word_on_the_tier_stands(even: Gateway, other_upstream: Upstream) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"content": "a"}, service_tier="scale")
        exchange.chunk({}, "stop", service_tier="scale")
        exchange.usage_chunk()
        exchange.done()

    other_upstream.play(plays(write))
    answer = await even.post(STREAM | {"service_tier": "priority"})
    assert answer.body.count(b"service_tier") == 2
    assert answer.body.count(b'"scale"') == 2


async def test_an_error_in_place_of_a_streams_first_event_is_passed_on(
    even: Gateway, other_upstream: Upstream
) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.piece(event_bytes({"error": {"message": "no", "code": 500}}))
        exchange.piece(b"data: [DONE]\n\n")
        exchange.end()

    other_upstream.play(plays(write))
    answer = await even.post(STREAM | {"service_tier": "priority"})
    assert json.loads(answer.events[0])["error"]["message"] == "no"


# ---- failures ----------------------------------------------------------------------------------------


async def test_routing_e7_a_busy_pool_gives_way_to_the_other_one(pools: Gateway, upstream: Upstream) -> None:
    upstream.default = BUSY
    answer = await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "60000")])
    assert (answer.status, answer.header("x-ctxgate-pool")) == (200, "fast")
    assert [row.settled.outcome for row in await pools.rows()] == [Outcome.OVERLOADED, Outcome.COMPLETED]
    assert pools.services.fleet.record("standard", "standard-0").health.failures == 0


async def test_routing_e7_busy_pools_all_are_429_with_retry_after(
    pools: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    upstream.default = other_upstream.default = BUSY
    answer = await pools.post(HELLO)
    assert (answer.status, answer.error["code"]) == (429, "server_is_overloaded")
    assert answer.header("retry-after") == "2"


async def test_routing_e6_a_retry_gets_what_is_left_and_none_comes_after_the_end(
    pools: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    now = {"us": 10**15}
    pools.services.steady_us = lambda: now["us"]

    def breaks(after_ms: int) -> Callable[[Exchange], Awaitable[None]]:
        async def behaviour(exchange: Exchange) -> None:
            now["us"] += after_ms * 1000
            await RESET(exchange)

        return behaviour

    asked = [bearer(), ("x-ctxgate-latency-ms", "60000")]
    upstream.play(breaks(2_900), breaks(200))  # a connection that broke is tried once more, then elsewhere
    answer = await pools.post(HELLO, headers=asked)
    assert (answer.status, answer.header("x-ctxgate-pool")) == (200, "fast")
    kept = pools.services.routing.decisions.of(answer.header("x-request-id"), "acme", "alpha")
    assert kept is not None
    assert [each["budget"]["total_us"] for each in kept] == [60_000_000, 57_100_000, 56_900_000]
    before = len(upstream.calls) + len(other_upstream.calls)
    upstream.play(breaks(60_000))
    answer = await pools.post(HELLO, headers=asked)
    assert (answer.status, answer.error["code"]) == (504, "latency_budget_exceeded")
    assert "60000 ms" in answer.error["message"]
    assert len(upstream.calls) + len(other_upstream.calls) == before + 1


async def test_a_bound_on_the_first_token_alone_forbids_no_retry(pools: Gateway, upstream: Upstream) -> None:
    now = {"us": 10**15}
    pools.services.steady_us = lambda: now["us"]

    async def breaks(exchange: Exchange) -> None:
        now["us"] += 60_000_000
        await RESET(exchange)

    upstream.default = breaks
    answer = await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "60000")])
    assert (answer.status, answer.header("x-ctxgate-fits")) == (200, "false")


async def test_routing_e10_replicas_of_one_name_in_two_pools_are_two(
    pools: Gateway, upstream: Upstream, other_upstream: Upstream, tmp_path: Any, start_gateway: Start
) -> None:
    made = config(tmp_path / "two.db", [upstream.url], fast=[other_upstream.url])
    named = {
        name: replace(pool, replicas=tuple(Replica("one", each.url) for each in pool.replicas))
        for name, pool in made.pools.items()
    }
    gateway = await Gateway.start(replace(made, pools=named))
    try:
        upstream.default = BUSY
        answer = await gateway.post(HELLO | {"service_tier": "flex"})
        assert (answer.status, answer.header("x-ctxgate-pool")) == (200, "fast")
        upstream.default, other_upstream.default = ok, BUSY
        answer = await gateway.post(HELLO | {"service_tier": "priority"})
        assert (answer.status, answer.header("x-ctxgate-pool")) == (200, "standard")
    finally:
        await gateway.stop()


async def test_a_defect_in_weighing_fails_no_request(pools: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> RouteDecision:
        raise ZeroDivisionError

    monkeypatch.setattr(routing, "choose", broken)
    answers_ = [await pools.post(HELLO) for _ in range(2)]
    assert {answer.status for answer in answers_} == {200}
    assert len({answer.header("x-ctxgate-replica") for answer in answers_}) == 1
    assert (await pools.metrics())["ctxgate_routing_failures_total"] == 2


# ---- what is known of decisions ----------------------------------------------------------------------


async def test_routing_i3_every_candidate_and_what_came_of_it_is_kept_for_the_team(pools: Gateway) -> None:
    pools.services.steady_us = lambda: 10**15
    answer = await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "1000")])
    path = f"/v1/routing/{answer.header('x-request-id')}"
    found = (await pools.get(path)).document
    (attempt,) = found["attempts"]
    assert (attempt["pool"], attempt["fits"], attempt["outcome"]) == ("fast", True, "completed")
    assert {(one["pool"], one["fits"]) for one in attempt["candidates"]} == {
        ("fast", True),
        ("standard", False),
    }
    assert (attempt["reported_prompt_tokens"], attempt["reported_cached_tokens"]) == (40, 32)
    assert attempt["budget"]["ttft_us"] == 1_000_000
    others = await pools.get(path, [bearer(BETA)])
    assert (others.status, others.error["code"]) == (404, "request_not_found")
    assert (await pools.get(path, ())).status == 401
    assert (await pools.get("/v1/routing/req_0")).status == 404


async def test_only_the_latest_decisions_are_kept_and_no_prompt_with_them(gateway: Gateway) -> None:
    kept = gateway.services.routing.decisions = Decisions(2)
    ids = []
    for number in range(3):
        said = HELLO | {"messages": [{"role": "user", "content": f"A word that is looked for, {number}."}]}
        ids.append((await gateway.post(said)).header("x-request-id"))
    assert len(kept) == 2
    assert [kept.of(one, "acme", "alpha") is None for one in ids] == [True, False, False]
    assert "looked for" not in repr(kept._requests)


async def test_decisions_and_budgets_are_counted(pools: Gateway) -> None:
    await pools.post(HELLO, headers=[bearer(), ("x-ctxgate-ttft-ms", "60000")])
    await pools.post(HELLO)
    metrics = await pools.metrics()
    chosen = [value for name, value in metrics.items() if name.startswith("ctxgate_routing_decisions_total")]
    assert sum(chosen) == 2
    kept = {
        name: value for name, value in metrics.items() if name.startswith("ctxgate_latency_budgets_total")
    }
    assert kept == {'ctxgate_latency_budgets_total{class="agent",kept="yes",pool="standard"}': 1}


async def test_routing_b16_i5_available_captured_and_delivered_share_one_denominator(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workload, routing and a stale index: each shows in another of the three."""
    gateway = await start_gateway(upstream, other_upstream)
    chosen = iter(("standard-0", "standard-1", "standard-0"))

    def scripted(*_: object, **__: object) -> RouteDecision:
        return RouteDecision("standard", next(chosen), "scripted", ())

    monkeypatch.setattr(routing, "choose", scripted)

    async def counts() -> list[float]:
        metrics = await gateway.metrics()
        name = 'ctxgate_prefix_tokens_total{kind="%s",model="m"}'
        return [metrics.get(name % kind, 0) for kind in ("prompt", "available", "captured", "delivered")]

    await send(gateway, upstream, turn(0), 3_000, 0)  # a new prompt: nothing was there to be had
    assert await counts() == [3_000, 0, 0, 0]
    await send(gateway, other_upstream, turn(1), 3_100, 0)  # it was warm elsewhere
    assert await counts() == [6_100, 2_992, 0, 0]
    await send(gateway, upstream, turn(2), 3_200, 0)  # warm here, as was thought
    prompt, available, captured, delivered = await counts()
    assert (prompt, captured, delivered) == (9_300, 2_992, 0)
    assert available == 2_992 + 3_088  # the other one has read more of it since
    assert (await gateway.metrics())['ctxgate_replica_switches_total{pool="standard"}'] == 2


async def test_an_answer_that_tells_no_hit_is_in_none_of_the_counts(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(answers(3_000, None))
    await gateway.post(turn(0))
    assert not any("ctxgate_prefix_tokens_total" in name for name in await gateway.metrics())
