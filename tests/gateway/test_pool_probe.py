"""Start-up probes of a running gateway: what they cost, what they teach, and that they hold nobody up."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.rules import Rule
from ctxgate.gateway import pool_probe, replica_watch
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.pool_probe import cache_config, problems
from ctxgate.gateway.replica_watch import SETTLE_US
from ctxgate.inference.template_facts import (
    CacheReport,
    Extension,
    Findings,
    TemplateFacts,
    Turns,
    Verdict,
)
from ctxgate.inference.usage import Certainty
from support.behaviours import plays, refuses
from support.gateway import HELLO, MODEL, Gateway, config, until
from support.twin import serving
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from support.upstream import Behaviour, Upstream

    Start = Callable[..., Awaitable[Gateway]]

PROBING = {"probe": True}


def answers(*cached: int | None) -> list[Behaviour]:
    """Whole answers that report so many cached tokens of 40."""
    return [reports(figure) for figure in cached]


def reports(cached: int | None) -> Behaviour:
    return plays(lambda exchange: exchange.answer(cached=cached))


async def examined(gateway: Gateway) -> Findings:
    """The findings of the only replica, once there are some and their calls are booked."""
    (record,) = gateway.services.fleet.records()
    await until(lambda: record.findings and not record.settling_until_us)
    return record.findings[MODEL]


@pytest.mark.integration
@pytest.mark.parametrize("renders", [True, False])
async def test_a_twin_is_probed_and_every_token_of_it_is_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renders: bool
) -> None:
    """What tokens show and usage cannot: that two spellings differ in nothing but their order."""
    if not renders:
        monkeypatch.setattr(pool_probe, "_RENDER", "/v1/nothing")
    order, calls = (Verdict.REORDERED, 3) if renders else (Verdict.UNKNOWN, 22)
    async with serving(served_name=MODEL) as twin:
        gateway = await Gateway.start(config(tmp_path / "l.db", [twin.url], pool=PROBING))
        try:
            findings = await examined(gateway)
            assert findings.cache == CacheReport(True, True, 16)
            assert findings.renders is renders
            assert findings.facts == TemplateFacts(
                Turns(Extension.YES),
                Turns(Extension.YES),
                Turns(Extension.YES),
                Turns(Extension.YES),
                arguments=order,
                empty_content=Verdict.EQUIVALENT,
                tool_order=order,
                call_ids=Verdict.EQUIVALENT,
            )
            fleet = gateway.services.fleet
            assert fleet.rules("standard", MODEL) == {Rule.ARGUMENTS, Rule.EMPTY_CONTENT, Rule.TOOLS}
            assert fleet.record("standard", "standard-0").reports_cached is True
            rows = await gateway.rows()
            assert len(rows) == calls
            opened = [row.opened for row in rows]  # no client's job, so of no class
            assert {(one.organisation, one.team, one.key_id) for one in opened} == {("ctxgate",) * 3}
            assert {(one.task, one.model, one.job_class) for one in opened} == {("probe", MODEL, None)}
            for name, kind in (
                ("prompt_tokens_cached_total", "cached"),
                ("generation_tokens_total", "output"),
            ):
                booked = sum(getattr(row.settled.usage, kind).value for row in rows)
                assert booked == await twin.metric(name)
            assert sum(row.settled.usage.prompt or 0 for row in rows) == await twin.metric(
                "prompt_tokens_total"
            )
            samples = await gateway.metrics()
            booked_samples = [
                value
                for name, value in samples.items()
                if name.startswith("ctxgate_tokens_total") and 'team="ctxgate"' in name and "output" in name
            ]
            assert sum(booked_samples) == calls
        finally:
            await gateway.stop()


async def test_gateways_b7_a_pool_that_reports_no_cached_tokens_is_marked_unknown_not_zero(
    upstream: Upstream, start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.default = reports(None)
    gateway = await start_gateway(upstream, pool=PROBING)
    assert (await examined(gateway)).cache.reports is False
    assert gateway.services.fleet.record("standard", "standard-0").reports_cached is False
    assert any("does not report cached tokens" in text for text in caplog.messages)
    samples = await gateway.metrics()
    assert samples['ctxgate_replica_reports_cached{pool="standard",replica="standard-0"}'] == 0
    await gateway.post(HELLO)
    usage = (await gateway.rows())[-1].settled.usage
    assert usage.cached.certainty is not Certainty.MEASURED
    assert usage.cached.value != 0


async def test_gateways_b8_after_the_probe_a_figure_that_is_left_out_is_zero(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.play(*answers(None, 32, None))
    upstream.default = reports(None)
    gateway = await start_gateway(upstream, pool=PROBING)
    assert (await examined(gateway)).cache.reports is True
    await gateway.post(HELLO)
    cached = (await gateway.rows())[-1].settled.usage.cached
    assert (cached.value, cached.certainty) == (0, Certainty.MEASURED)


async def test_a_hit_under_another_salt_is_warned_of(
    upstream: Upstream, start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.play(*answers(0, 32, 32))
    gateway = await start_gateway(upstream, pool=PROBING)
    assert (await examined(gateway)).cache.isolates is False
    assert any("tenants are not isolated" in text for text in caplog.messages)


async def test_without_the_switch_nothing_is_sent(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream)
    await until(lambda: upstream.probes > 0)
    await gateway.post(HELLO)
    assert len(upstream.calls) == 1
    assert upstream.abort_calls == []


async def test_a_probe_that_is_refused_leaves_everything_unknown(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.default = refuses(400, b'{"error":{"message":"no","type":"x","param":null,"code":400}}')
    upstream.abort_status = 403
    gateway = await start_gateway(upstream, pool=PROBING)
    assert await examined(gateway) == Findings()
    upstream.default = ok
    assert (await gateway.post(HELLO)).status == 200


async def test_a_probe_holds_up_no_request_and_readiness_for_a_bounded_time(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.play(by_hand)
    gateway = await start_gateway(upstream, pool=PROBING)
    held = await upstream.next_call()  # the probe's first call, which gets no answer
    assert (await gateway.post(HELLO)).status == 200
    assert (await gateway.get("/ready")).status == 503
    clock = gateway.services.fleet.clock
    gateway.services.fleet.clock = lambda: clock() + SETTLE_US
    assert (await gateway.get("/ready")).status == 200
    held.answer()


async def test_a_replica_that_is_down_is_not_waited_for(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    await other_upstream.stop()
    upstream.play(by_hand)
    gateway = await start_gateway(upstream, other_upstream, pool=PROBING)
    held = await upstream.next_call()
    assert (await gateway.get("/ready")).status == 503  # the first one is being asked
    held.answer()
    up, down = gateway.services.fleet.records()
    await until(lambda: up.findings and not up.settling_until_us and not down.settling_until_us)
    assert (await gateway.get("/ready")).status == 200
    assert (down.health.probe_ok, down.findings) == (False, {})


async def test_a_call_that_takes_too_long_is_ended_at_the_engine_and_booked(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_probe, "PATIENCE_S", 0.0)
    upstream.play(by_hand)
    gateway = await start_gateway(upstream, pool=PROBING)
    call = await upstream.next_call()
    await asyncio.wait_for(call.aborted.wait(), 10)
    monkeypatch.setattr(pool_probe, "PATIENCE_S", 60.0)
    call.answer("abort", prompt=40, cached=0, completion=1)
    await examined(gateway)
    first = (await gateway.rows())[0]
    assert first.settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert (first.opened.task, first.settled.usage.prompt) == ("probe", 40)


async def test_a_gateway_that_stops_ends_its_probe_and_books_it(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.play(by_hand)
    gateway = await start_gateway(upstream, pool=PROBING)
    call = await upstream.next_call()
    await asyncio.wait_for(gateway.stop(), 10)
    assert call.closed.is_set() or call.aborted.is_set()


async def test_a_replica_that_comes_back_is_probed_again_but_not_all_the_time(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_watch, "PROBE_EVERY_S", 0.005)
    upstream.default = reports(None)
    gateway = await start_gateway(upstream, pool=PROBING)
    await examined(gateway)
    (record,) = gateway.services.fleet.records()
    upstream.default = reports(32)

    async def out_and_back() -> None:
        upstream.health_status = 503
        await until(lambda: not record.health.probe_ok)
        upstream.health_status, upstream.probes = 200, 0
        await until(lambda: record.health.probe_ok and upstream.probes > 3)

    calls = len(upstream.calls)
    await out_and_back()
    assert len(upstream.calls) == calls
    monkeypatch.setattr(replica_watch, "EXAMINE_EVERY_US", 0)
    await out_and_back()
    await until(lambda: record.reports_cached)
    assert len(upstream.calls) > calls


async def test_an_engine_of_another_fingerprint_is_probed_again(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_watch, "PROBE_EVERY_S", 0.005)
    monkeypatch.setattr(replica_watch, "EXAMINE_EVERY_US", 0)
    upstream.default = reports(32)
    gateway = await start_gateway(upstream, pool=PROBING)
    await examined(gateway)
    (record,) = gateway.services.fleet.records()
    record.fingerprint, upstream.probes = "one", 0  # as the first answer tells it
    await until(lambda: upstream.probes > 3)
    calls = len(upstream.calls)
    record.fingerprint = "another"
    await until(lambda: len(upstream.calls) > calls)


async def test_a_defect_in_probing_is_logged_and_the_gateway_serves(
    upstream: Upstream,
    start_gateway: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: Any) -> Any:
        raise LookupError("a defect")

    monkeypatch.setattr(pool_probe, "examine", broken)
    gateway = await start_gateway(upstream, pool=PROBING)
    await until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert "examining replica standard/standard-0 failed" in caplog.messages
    assert (await gateway.get("/ready")).status == 200
    assert (await gateway.post(HELLO)).status == 200


@pytest.mark.integration
async def test_the_cache_configuration_is_read_from_the_metrics(tmp_path: Path) -> None:
    async with serving(block_size=32, blocks=101, max_model_len=2048) as twin:
        gateway = await Gateway.start(config(tmp_path / "l.db", [twin.url]))
        try:
            (record,) = gateway.services.fleet.records()
            found = await cache_config(gateway.services, record)
            assert (found["block_size"], found["num_gpu_blocks"]) == ("32", "101")
            assert found["enable_prefix_caching"] == "True"
        finally:
            await gateway.stop()


FINE = Findings(CacheReport(True, True, 16), True, TemplateFacts())


@pytest.mark.parametrize(
    ("findings", "caching", "aborts_wanted", "words"),
    [
        (FINE, True, False, []),
        (FINE, False, False, ["prefix caching is off"]),
        (FINE, True, True, ["cannot abort by id"]),
        (Findings(CacheReport(False)), True, False, ["booked as unknown"]),
        (Findings(CacheReport(None)), True, False, ["had no cached tokens, or was not answered"]),
        (Findings(CacheReport(True, False, 16)), True, False, ["tenants are not isolated"]),
        (
            Findings(
                FINE.cache,
                True,
                TemplateFacts(
                    reasoning=Turns(Extension.NO, 40),
                    tools=Turns(Extension.BUT_ANSWER, 4),
                    tool_order=Verdict.DIFFERENT,
                    call_ids=Verdict.RENAMED,
                ),
            ),
            True,
            False,
            ["renders earlier turns anew (reasoning)", "takes for the same (tools)"],
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_cure(
    findings: Findings, caching: bool, aborts_wanted: bool, words: list[str]
) -> None:
    found = problems(findings, caching=caching, aborts_wanted=aborts_wanted)
    assert len(found) == len(words)
    for problem, part in zip(found, words, strict=True):
        assert part in problem


@pytest.mark.parametrize(
    ("plain", "tools", "kept"),
    [
        (Extension.YES, Extension.YES, 100),
        (Extension.YES, Extension.UNKNOWN, 100),
        (Extension.BUT_ANSWER, Extension.UNKNOWN, 0),
        (Extension.YES, Extension.NO, 0),
        (Extension.UNKNOWN, Extension.UNKNOWN, 100),
    ],
)
async def test_how_a_template_prints_answers_is_what_the_prefix_index_expects(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, plain: Extension, tools: Extension, kept: int
) -> None:
    findings = Findings(facts=TemplateFacts(plain=Turns(plain), tools=Turns(tools)))
    found = pool_probe.Examined(MODEL, MODEL, None, 16, aborts=False, findings=findings)

    async def run(*_: object, aborts: bool) -> pool_probe.Examined:
        return found

    monkeypatch.setattr(pool_probe._Examination, "run", run)
    services = gateway.services
    (record,) = services.fleet.records()
    assert found in await pool_probe.examine(services, record)
    memory = services.misses.index._places[record.pool.name, record.replica.name]
    assert memory.kept_of(100) == kept
