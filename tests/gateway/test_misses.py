"""Misses in a running gateway: what is expected, foreseen, booked, counted and told, and what never is."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway import misses as misses_module
from ctxgate.gateway import routing
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.inference.template_facts import Extension, Findings, TemplateFacts, Turns
from ctxgate.routing.choose import RouteDecision
from support.behaviours import plays
from support.gateway import BETA, MODEL, bearer
from support.missing import LONG, answers, booked, send, told, turn
from support.twin import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration


async def test_a_growing_conversation_finds_what_is_expected(start_gateway: Start) -> None:
    async with serving(block_size=16, max_model_len=8_192) as twin:
        gateway = await start_gateway(twin, served_name="tiny")
        for number in range(6):
            answer = await gateway.post(turn(number))
            expected, miss = told(answer)
            assert miss == ""
            details = answer.document["usage"]["prompt_tokens_details"]
            assert expected == (str(details["cached_tokens"]) if number else "")
        rows = await gateway.rows()
    predicted = [row.opened.predicted_cached_tokens for row in rows]
    assert predicted == [None, *(row.settled.usage.cached.value for row in rows[1:])]
    assert await booked(gateway) == [None] * 6


async def test_equal_tools_promise_nothing_where_the_template_prints_the_system_text_first(
    start_gateway: Start,
) -> None:
    """The tiny template does. Only a conversation with all of the same head finds what is expected."""

    def first(system: str, question: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return {"model": MODEL, "messages": messages, "max_tokens": 2, "tools": tools}

    function = {"name": "look", "description": LONG, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    figures = []
    async with serving(block_size=16, max_model_len=8_192) as twin:
        gateway = await start_gateway(twin, served_name="tiny")
        for system, question in (("Be brief.", "What?"), ("Answer in verse.", "Who?"), ("Be brief.", "Why?")):
            answer = await gateway.post(first(system, question))
            expected, miss = told(answer)
            assert miss == ""
            usage = answer.document["usage"]
            figures.append(
                (expected, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
            )
    (_, _, whole), (no_hit, found, _), (hit, found_again, _) = figures
    assert (no_hit, found < 64) == ("0", True)
    assert 0 <= found_again - int(hit) <= 32
    assert int(hit) > whole - 64
    assert await booked(gateway) == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_gateways_l13_context_j10_a_clock_in_the_system_prompt_is_named_and_priced(
    start_gateway: Start, stream: bool
) -> None:
    async with serving(block_size=16, max_model_len=8_192) as twin:
        gateway = await start_gateway(twin, served_name="tiny")
        await gateway.post(turn(0, system="It is 2026-11-30T09:00:00Z.", stream=stream))
        answer = await gateway.post(turn(1, system="It is 2026-11-30T09:00:47Z.", stream=stream))
    _, header = told(answer)
    assert header.startswith(
        "system_changed; detail=volatile_in_head/clock; field=messages[0].content; avoidable="
    )
    first, second = await gateway.rows()
    assert first.settled.miss is None
    miss, usage = second.settled.miss, second.settled.usage
    assert miss is not None
    assert (miss.cause, miss.index) == (MissCause.SYSTEM_CHANGED, 0)
    # Byte 54 is where 00 becomes 47: behind {"role": "system", "content": "It is 2026-11-30T09:00:
    assert miss.offset == len('{"role": "system", "content": "It is 2026-11-30T09:00:')
    before, prompt, cached = first.settled.usage.prompt, usage.prompt, usage.cached.value
    assert before is not None
    assert prompt is not None
    assert cached is not None
    assert miss.avoidable_tokens is not None
    # All of the first prompt but the clock's own message, to two blocks.
    assert 0 <= before - cached - miss.avoidable_tokens <= 40 + 32
    assert miss.avoidable_nano == 900 * miss.avoidable_tokens  # 1000 a token instead of 100
    metrics = await gateway.metrics()
    labels = '{cause="system_changed",pool="standard"}'
    assert metrics[f"ctxgate_cache_misses_total{labels}"] == 1
    assert metrics[f"ctxgate_avoidable_tokens_total{labels}"] == miss.avoidable_tokens
    assert metrics[f"ctxgate_avoidable_nano_dollars_total{labels}"] == miss.avoidable_nano


async def test_what_is_foreseen_is_told_where_an_answer_begins_before_its_usage(
    gateway: Gateway, upstream: Upstream
) -> None:
    """A stream's header is a forecast: here the engine had this form in its cache after all."""
    await send(gateway, upstream, turn(0), 600, 0)
    answer = await send(gateway, upstream, turn(1, system="Be kind.", stream=True), 620, 608)
    assert told(answer)[1].startswith("system_changed; detail=system_changed; field=messages[0].content")
    assert await booked(gateway) == [None, None]


async def test_an_evicted_prefix_and_one_that_expired(gateway: Gateway, upstream: Upstream) -> None:
    other = turn(0, system="Another conversation.") | {"user": "someone else"}
    other["messages"][1] = {"role": "user", "content": "Short."}
    await send(gateway, upstream, turn(0), 3_000, 0)
    await send(gateway, upstream, turn(1), 3_100, 992)  # nothing else was written here
    await send(gateway, upstream, other, 4_000, 0)
    answer = await send(gateway, upstream, turn(2), 3_200, 0)
    assert told(answer) == ("3088", "evicted; avoidable=3088")
    expired, evicted = (await booked(gateway))[1::2]
    assert expired == Miss(MissCause.EXPIRED, avoidable_tokens=2_000, avoidable_nano=2_000 * 900)
    assert evicted == Miss(MissCause.EVICTED, avoidable_tokens=3_088, avoidable_nano=3_088 * 900)


async def test_routing_d1_a_template_that_drops_old_turns_is_named_where_a_probe_saw_it(
    gateway: Gateway, upstream: Upstream
) -> None:
    facts = TemplateFacts(plain=Turns(Extension.YES), reasoning=Turns(Extension.NO, lost=40))
    gateway.services.fleet.record("standard", "standard-0").findings[MODEL] = Findings(facts=facts)
    await send(gateway, upstream, turn(0), 3_000, 0)
    answer = await send(gateway, upstream, turn(1), 3_100, 1_008)
    assert told(answer)[1] == "template_changed; detail=history_rewritten; avoidable=1984"


async def test_routing_b15_a_conversation_that_moved_is_told_where_it_was_warm(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    chosen = iter(("standard-0", "standard-1", "standard-1"))

    def choose(*_: object, **__: object) -> RouteDecision:
        return RouteDecision("standard", next(chosen), "scripted", ())

    monkeypatch.setattr(routing, "choose", choose)
    await send(gateway, upstream, turn(0), 3_000, 0)
    await send(gateway, other_upstream, turn(1, stream=True), 3_100, 0)
    answer = await send(gateway, other_upstream, turn(2), 3_200, 3_088)
    assert told(answer) == ("3088", "")
    moved = Miss(
        MissCause.MOVED_REPLICA, "standard/standard-0", avoidable_tokens=2_992, avoidable_nano=2_992 * 900
    )
    assert await booked(gateway) == [None, moved, None]


async def test_gateways_b7_an_engine_that_does_not_report_is_not_blamed(
    gateway: Gateway, upstream: Upstream
) -> None:
    await send(gateway, upstream, turn(0), 3_000, None)
    answer = await send(gateway, upstream, turn(1), 3_100, None)
    assert told(answer) == ("2992", "not_reported")
    assert await booked(gateway) == [None, Miss(MissCause.NOT_REPORTED)]
    metrics = await gateway.metrics()
    assert metrics['ctxgate_cache_misses_total{cause="not_reported",pool="standard"}'] == 1
    assert not any(name.startswith("ctxgate_avoidable_tokens_total") for name in metrics)


async def test_calls_that_never_ran_are_not_explained_and_teach_nothing(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.script.append(plays(lambda exchange: exchange.respond(400, b'{"error":{"message":"no"}}')))
    assert (await gateway.post(turn(0))).status == 400
    assert told(await send(gateway, upstream, turn(1, system="Be kind."), 3_000, 0)) == ("", "")
    assert await booked(gateway) == [None, None]


async def test_a_defect_in_explaining_fails_no_request(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await send(gateway, upstream, turn(0), 3_000, 0)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(LONG)

    with monkeypatch.context() as patched:
        patched.setattr(misses_module, "verdict", broken)
        assert (await send(gateway, upstream, turn(1), 3_100, 0)).status == 200
    with monkeypatch.context() as patched:
        patched.setattr(gateway.services.misses._digester, "chat", broken)
        assert (await send(gateway, upstream, turn(2), 3_200, 0)).status == 200
    with monkeypatch.context() as patched:
        patched.setattr(misses_module, "diverge", broken)
        assert (await send(gateway, upstream, turn(3, system="x"), 3_300, 0)).status == 200
    assert [row.settled.usage.prompt for row in await gateway.rows()] == [3_000, 3_100, 3_200, 3_300]
    assert (await gateway.metrics())["ctxgate_explain_failures_total"] >= 3
    assert LONG not in caplog.text


async def test_large_bodies_are_compared_beside_the_answer_not_before_it(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first text reaches the client while the comparison is still held up; the ledger is exact."""
    misses, gate, exact = gateway.services.misses, threading.Event(), misses_module._difference
    monkeypatch.setattr(misses, "_compared_at_once", 0)
    monkeypatch.setattr(misses_module, "LAST_WAIT_S", 10.0)
    monkeypatch.setattr(
        misses_module, "_difference", lambda before, after: gate.wait() and exact(before, after)
    )
    await send(gateway, upstream, turn(0, system="It is 2026-11-30T09:00:00Z."), 3_000, 0)
    upstream.script.append(answers(3_100, 0))
    async with gateway.wire() as wire:
        wire.request(
            "/v1/chat/completions", turn(1, system="It is 2026-11-30T09:00:47Z.", stream=True), [bearer()]
        )
        head = await wire.head()
        # From digests alone: which message, but neither which of its fields nor what is volatile in it.
        assert "system_changed; detail=system_changed; field=messages[0]; " in head.header("x-ctxgate-miss")
        assert b'"a "' in await wire.chunk()
        gate.set()
        await wire.rest(head)
    miss = (await booked(gateway))[1]
    assert miss is not None
    assert (miss.detail, miss.field) == ("volatile_in_head/clock", "messages[0].content")
    assert miss.offset == len('{"role": "system", "content": "It is 2026-11-30T09:00:')


async def test_a_comparison_that_takes_too_long_leaves_the_coarse_cause(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    misses, gate = gateway.services.misses, threading.Event()
    monkeypatch.setattr(misses, "_compared_at_once", 0)
    monkeypatch.setattr(misses_module, "LAST_WAIT_S", 0.01)
    monkeypatch.setattr(misses_module, "_difference", lambda *_: gate.wait())
    await send(gateway, upstream, turn(0), 3_000, 0)
    await send(gateway, upstream, turn(1, system="Be kind."), 3_100, 0)
    miss = (await booked(gateway))[1]
    gate.set()
    assert miss is not None
    assert (miss.cause, miss.field, miss.offset) == (MissCause.SYSTEM_CHANGED, "messages[0]", None)


async def test_a_body_that_is_no_longer_kept_is_compared_by_digests(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(gateway, upstream, turn(0), 3_000, 0)
    monkeypatch.setattr(gateway.services.misses._previous, "body", lambda _before: None)
    await send(gateway, upstream, turn(1, system="Be kind."), 3_100, 0)
    miss = (await booked(gateway))[1]
    assert miss is not None
    assert (miss.cause, miss.index, miss.offset) == (MissCause.SYSTEM_CHANGED, 0, None)


async def test_nothing_of_a_prompt_is_kept_but_where_it_changed(
    gateway: Gateway, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    def message(text: str) -> dict[str, Any]:
        return {"role": "user", "content": "go", "SECRET-NAME\r\nx-evil: 1": text}

    first = {"model": MODEL, "messages": [message("SECRET-ONE"), {"role": "user", "content": LONG}]}
    await send(gateway, upstream, first, 3_000, 0)
    second = {"model": MODEL, "messages": [message("SECRET-TWO"), first["messages"][1]]}
    answer = await send(gateway, upstream, second, 3_000, 0)
    assert "field=messages[0].?; " in told(answer)[1]
    await gateway.rows()
    with closing(sqlite3.connect(gateway.application.config.store)) as connection:
        dump = "\n".join(connection.iterdump())
    assert "history_edited" in dump
    metrics = (await gateway.get("/metrics", ())).body.decode()
    for place in (dump, str(answer.headers), metrics, caplog.text):
        assert "SECRET" not in place
        assert "evil" not in place


async def test_teams_do_not_learn_of_each_others_prompts(gateway: Gateway, upstream: Upstream) -> None:
    await send(gateway, upstream, turn(0), 3_000, 0)
    upstream.script.append(answers(3_100, 0))
    answer = await gateway.post(turn(1, system="Be kind."), headers=[bearer(BETA)])
    assert told(answer)[1] == ""
    assert await booked(gateway) == [None, None]


async def test_context_j2_prompts_are_compared_as_they_go_out(
    upstream: Upstream, start_gateway: Start
) -> None:
    """At level `safe` the tools go out in their first order, so the client's new one misses nothing."""
    gateway = await start_gateway(upstream, layout="safe")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    await send(gateway, upstream, turn(0, tools=tools), 3_000, 0)
    answer = await send(gateway, upstream, turn(1, tools=tools[::-1]), 3_100, 2_992)
    assert told(answer) == ("2992", "")
    upstream.script.append(answers(3_200, 96))
    heading = [bearer(), ("x-ctxgate-layout", "off")]
    answer = await gateway.post(turn(2, tools=tools[::-1]), headers=heading)
    assert told(answer)[1].startswith("reordered; detail=tools_reordered; field=tools[0]; avoidable=")


async def test_routing_d4_a_completions_prompt_is_followed_as_a_whole(
    gateway: Gateway, upstream: Upstream
) -> None:
    for prompt, cached, expectation in (
        (LONG, 0, ""),
        (LONG, 496, "496"),
        (LONG + "more", 480, "496"),
        ([LONG, LONG], 0, ""),
        ([LONG, LONG], 0, ""),
    ):
        upstream.script.append(answers(500, cached))
        answer = await gateway.post({"model": MODEL, "prompt": prompt}, "/v1/completions")
        assert told(answer) == (expectation, "")
    upstream.script.append(answers(500, 0))
    answer = await gateway.post({"model": MODEL, "prompt": LONG}, "/v1/completions")
    assert told(answer)[1].startswith("expired; avoidable=496")


async def test_embeddings_have_no_expectation(gateway: Gateway) -> None:
    for _ in range(2):
        assert told(await gateway.post({"model": MODEL, "input": "x"}, "/v1/embeddings")) == ("", "")


async def test_usage_by_cause(gateway: Gateway, upstream: Upstream) -> None:
    await send(gateway, upstream, turn(0), 3_000, 0)
    await send(gateway, upstream, turn(1, system="Be kind."), 3_100, 0)
    await gateway.rows()
    document = json.loads((await gateway.get("/v1/usage?by=cause")).body)
    assert {row["group"]: row["requests"] for row in document["rows"]} == {"no miss": 1, "system_changed": 1}
