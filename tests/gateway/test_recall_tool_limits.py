"""What ends a look-up between two calls: time, the ledger, a shutdown, a deletion; and what it costs then."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.recall_tool import DEFINITION, NAME
from ctxgate.gateway import attempt
from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.recall_answers import TOO_MANY
from support.behaviours import BUSY, until_aborted
from support.gateway import MODEL, bearer, until
from support.looking_up import CONTEXT, NEEDLE, TOOLS, Agent, call, calls, extends, says

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.client import Answer
    from support.gateway import Gateway
    from support.upstream import Behaviour, Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

TOOL = json.loads(DEFINITION)


async def agent(start: Start, upstream: Upstream, *, stream: bool = False, **options: Any) -> Agent:
    found = Agent(await start(upstream, context=CONTEXT, **options), upstream, stream)
    await found.begin()
    return found


def then(behaviour: Behaviour, step: Callable[[], None]) -> Behaviour:
    """A behaviour, and something else that has happened by the time its answer is there."""

    async def play(exchange: Exchange) -> None:
        step()
        await behaviour(exchange)

    return play


def code_of(answer: Answer, *, stream: bool) -> str:
    code: str = (answer.documents[-1] if stream else answer.document)["error"]["code"]
    return code


class Clock:
    def __init__(self) -> None:
        self.now_us = 10**12

    def __call__(self) -> int:
        return self.now_us

    def pass_minute(self) -> None:
        self.now_us += 60_000_000


@pytest.mark.parametrize("stream", [False, True])
async def test_once_its_time_is_over_nothing_more_is_looked_up_and_the_answer_goes_on(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    """A budget refuses no answer that is being made; the tool stays, for the prompt's beginning is cached."""
    one = await agent(start_gateway, upstream, stream=stream)
    clock = one.gateway.services.steady_us = Clock()
    one.headers = (("x-ctxgate-latency-ms", "60000"),)
    upstream.play(calls(call()), then(calls(call(id_="c2")), clock.pass_minute), says("So be it."))
    assert (await one.ask()).status == 200
    assert one.messages[-1]["content"] == "So be it."
    results = [each["content"] for each in one.sent()[-1] if each["role"] == "tool"][1:]
    assert [NEEDLE in text for text in results] == [True, False]
    assert results[-1] == TOO_MANY
    assert upstream.calls[-1].document["tools"] == [*TOOLS, TOOL]
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert extends(one.sent())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_further_call_that_fails_is_not_tried_again_once_the_time_is_over(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    gateway = await start_gateway(upstream, other_upstream, context=CONTEXT)
    one = Agent(gateway, upstream, stream)
    clock = one.gateway.services.steady_us = Clock()
    one.headers = (("x-ctxgate-latency-ms", "60000"),)
    for each in (upstream, other_upstream):
        each.play(calls(call()), then(BUSY, clock.pass_minute))
    answer = await one.ask()
    assert code_of(answer, stream=stream) == "latency_budget_exceeded"
    assert answer.status == (200 if stream else 504)
    assert sorted([len(upstream.calls), len(other_upstream.calls)]) == [0, 2]
    await gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_further_call_is_made_that_could_not_be_booked(
    upstream: Upstream, start_gateway: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    ledger = type(one.gateway.services.ledger)

    def fails() -> None:
        monkeypatch.setattr(ledger, "healthy", property(lambda _: False))

    upstream.play(then(calls(call()), fails))
    answer = await one.ask()
    monkeypatch.undo()
    assert code_of(answer, stream=stream) == "ledger_unavailable"
    assert answer.status == (200 if stream else 503)
    assert len(upstream.calls) == 2
    await one.gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shutdown_during_the_search_lets_no_further_call_begin(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    application = one.gateway.application

    async def searched(*_: object, **__: object) -> None:
        application.call_off()

    one.gateway.services.recall.query = searched  # type: ignore[method-assign]  # a stand-in
    upstream.play(calls(call()))
    answer = await one.ask()
    assert code_of(answer, stream=stream) == "shutting_down"
    assert len(upstream.calls) == 2
    await one.gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_further_call_that_stays_silent_ends_as_a_timeout(
    upstream: Upstream, start_gateway: Start, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(first_byte_timeout_s=0.2)
    one = await agent(start_gateway, upstream, stream=stream, limits=limits)
    upstream.play(calls(call()), until_aborted)
    answer = await one.ask()
    assert code_of(answer, stream=stream) == "upstream_timeout"
    assert answer.status == (200 if stream else 504)
    assert answer.clean
    rows = [row.settled.outcome for row in await one.gateway.rows() if row.opened.purpose == "recall"]
    assert rows == [Outcome.TIMED_OUT]
    assert not [each for each in caplog.messages if "failed" in each]
    assert attempt._TOO_LATE.__traceback__ is None, "what is raised for many requests keeps none of them"
    await one.gateway.quiet()


async def test_what_is_deleted_between_two_calls_is_neither_found_nor_kept(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    (task,) = {row.opened.task for row in await one.gateway.rows()}
    gateway = one.gateway

    async def deletes(exchange: Exchange) -> None:
        assert (await gateway.get(f"/v1/context?task={task}", method="DELETE")).status == 200
        await calls(call(id_="c2"))(exchange)

    upstream.play(calls(call()), deletes, says("It is kx."))
    assert (await one.ask()).status == 200
    results = [each["content"] for each in one.sent()[-1] if each["role"] == "tool"][1:]
    assert [NEEDLE in text for text in results] == [True, False]
    await gateway.quiet()
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert NAME not in json.dumps(one.sent()[-1]), "no trace of it in later prompts"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_least_output_and_a_choice_among_tools_hold_for_what_is_left(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream, granted=frozenset({"min_tokens"}))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}
    one.options = {"min_tokens": 40, "max_tokens": 100, "tool_choice": choice}
    upstream.play(calls(call(), completion=30), calls(call(id_="c2"), completion=30), says("x"))
    await one.ask()
    sent = [each.document for each in upstream.calls[1:]]
    assert [each["min_tokens"] for each in sent] == [40, 10, 0]
    assert [each["max_tokens"] for each in sent] == [100, 70, 40]
    assert [each["tool_choice"] for each in sent] == [choice] * 3
    one.options = {"tool_choice": {"type": "function", "function": {"name": NAME}}}
    upstream.play(calls(call()), says("x"))
    await one.ask({"role": "user", "content": "Look it up."})
    assert [each.document["tool_choice"] for each in upstream.calls[-2:]] == [
        one.options["tool_choice"],
        "none",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [False, True])
async def test_usage_is_told_as_it_is_asked_for_and_adds_up_to_the_ledger(
    upstream: Upstream, start_gateway: Start, stream: bool, asked: bool
) -> None:
    """The sum is what was paid; the last of the `iterations` is the prompt that an agent has to watch."""
    one = await agent(start_gateway, upstream)
    figures: list[dict[str, Any]] = [
        {"prompt": 100, "cached": 64, "completion": 20},
        {"prompt": 200, "cached": 96, "completion": 4},
    ]
    upstream.play(calls(call(), **figures[0]), says("It is kx.", **figures[1]))
    body: dict[str, Any] = {"model": MODEL, "messages": one.messages, "tools": TOOLS, "stream": stream}
    if stream and asked:
        body["stream_options"] = {"include_usage": True}
    answer = await one.gateway.post(body, headers=(bearer(),))
    documents = answer.documents if stream else [answer.document]
    told = [document["usage"] for document in documents if document.get("usage")]
    rows = [row.settled for row in (await one.gateway.rows())[-2:]]
    assert sum(row.usage.prompt or 0 for row in rows) == 300
    if stream and not asked:
        assert told == []
        return
    (usage,) = told
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (300, 24, 324)
    assert [each["prompt_tokens"] for each in usage["iterations"]] == [100, 200]
    nano = sum(row.charge.total or 0 for row in rows)
    assert nano == (36 + 104) * 1000 + 160 * 100 + 24 * 2000
    assert round(usage["cost"] * 10**9) == nano


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cost_that_the_first_call_did_not_tell_counts_as_it_is_booked(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)

    async def tells_no_usage(exchange: Exchange) -> None:
        if stream:
            exchange.head()
            exchange.chunk({"role": "assistant", "tool_calls": [{"index": 0, **call()}]})
            exchange.chunk({}, "tool_calls")
            exchange.done()
            return
        document = exchange.answer_document("tool_calls", "")
        document["choices"][0]["message"] |= {"content": None, "tool_calls": [call()]}
        del document["usage"]
        exchange.respond(200, json.dumps(document).encode())

    upstream.play(tells_no_usage, says("It is kx.", prompt=40, cached=32, completion=3))
    answer = await one.ask()
    usage = answer.documents[-1]["usage"] if stream else answer.document["usage"]
    totals = [row.settled.charge.total for row in (await one.gateway.rows())[-2:]]
    booked = [total for total in totals if total is not None]
    assert len(booked) == 2
    assert round(usage["cost"] * 10**9) == sum(booked)
    assert sum(booked) > 8 * 1000 + 32 * 100 + 3 * 2000, "more than the second call alone"
    if not stream:
        assert answer.header("x-ctxgate-cost") == f"{sum(booked) / 10**9:.9f}".rstrip("0")


async def test_a_client_of_a_slow_search_holds_nobody_up(upstream: Upstream, start_gateway: Start) -> None:
    """Between two calls of one answer others are served."""
    one = await agent(start_gateway, upstream)
    searching, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object, **__: object) -> None:
        searching.set()
        await go_on.wait()

    one.gateway.services.recall.query = slow  # type: ignore[method-assign]  # a stand-in
    upstream.play(calls(call()), says("Other."), says("It is kx."))
    asking = asyncio.create_task(one.ask())
    await searching.wait()
    other = await one.gateway.post({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    assert other.document["choices"][0]["message"]["content"] == "Other."
    go_on.set()
    assert (await asking).status == 200
    await until(lambda: not one.gateway.state.tasks)
