"""How an answer ends that was to go on after a look-up: failures, clients that leave, stores that fail."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.recall_tool import DEFINITION, NAME
from ctxgate.gateway.ledger import LedgerError, Outcome
from support.behaviours import BUSY, RESET, dies_after, refuses, streams_until_aborted, vllm_error
from support.gateway import MODEL, bearer, until
from support.looking_up import CONTEXT, NEEDLE, TOOLS, Agent, call, calls, says
from support.upstream import by_hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.compression.ask import Ask
    from ctxgate.gateway.ledger import Attempt
    from support.gateway import Gateway
    from support.upstream import Behaviour, Upstream

    Start = Callable[..., Awaitable[Gateway]]

TOOL = json.loads(DEFINITION)
TOO_LONG = vllm_error(
    "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens.",
    "BadRequestError",
    400,
)


async def agent(start: Start, *upstreams: Upstream, stream: bool = False) -> Agent:
    gateway = await start(*upstreams, context=CONTEXT)
    found = Agent(gateway, upstreams[0], stream)
    if len(upstreams) == 1:
        await found.begin()
    return found


def outcomes(rows: list[Attempt]) -> list[tuple[str, Outcome]]:
    """Purpose and outcome of each row, in the order of their opening."""
    ordered = sorted(rows, key=lambda row: (row.opened.opened_at_us, row.opened.attempt_number))
    return [(row.opened.purpose, row.settled.outcome) for row in ordered if row.settled is not None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [(BUSY,), (RESET, RESET)])
async def test_another_replica_goes_on_where_the_first_one_fails(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Start,
    stream: bool,
    failure: tuple[Behaviour, ...],
) -> None:
    both = (upstream, other_upstream)
    one = await agent(start_gateway, *both, stream=stream)
    for each in both:
        each.play(calls(call("{}", "r1", "read")))
    await one.ask()
    served = next(each for each in both if each.calls)
    other = next(each for each in both if not each.calls)
    one.messages.append({"role": "tool", "tool_call_id": "r1", "content": "x\n" * 900 + NEEDLE + "\ny" * 900})
    for each in both:
        each.script.clear()
    served.play(calls(call()), *failure)
    other.play(says("Here."))
    answer = await one.ask()
    assert answer.status == 200
    assert one.messages[-1]["content"] == "Here."
    assert [len(served.calls), len(other.calls)] == [2 + len(failure), 1]
    assert other.calls[0].document["messages"] == served.calls[2].document["messages"]
    assert [purpose for purpose, _ in outcomes(await one.gateway.rows())] == [
        "answer",
        "answer",
        *["recall"] * (len(failure) + 1),
    ]
    await one.gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_where_no_replica_can_go_on_the_client_is_told(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call(), text="I look."), RESET, RESET)
    answer = await one.ask()
    if stream:
        assert answer.status == 200
        assert "error" in answer.documents[-1]
        assert b"[DONE]" not in answer.body
        assert answer.clean
    else:
        assert answer.status == 502
        assert answer.error["code"]
    assert outcomes(await one.gateway.rows())[1:] == [
        ("answer", Outcome.COMPLETED),
        ("recall", Outcome.UNREACHABLE),
        ("recall", Outcome.UNREACHABLE),
    ]
    await one.gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_idled_too_long_is_made_anew(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    """A server may close one just when the next call goes out, also between two calls of one answer."""
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call()), RESET, says("Here."))
    assert (await one.ask()).status == 200
    assert one.messages[-1]["content"] == "Here."
    assert upstream.calls[-1].document == upstream.calls[-2].document
    assert outcomes(await one.gateway.rows())[-2:] == [
        ("recall", Outcome.UNREACHABLE),
        ("recall", Outcome.COMPLETED),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overload_between_two_calls_is_told_as_one(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call()), BUSY)
    answer = await one.ask()
    if stream:
        assert answer.documents[-1]["error"]["code"] == "server_is_overloaded"
    else:
        assert (answer.status, answer.header("retry-after")) == (429, "2")
        assert answer.error["code"] == "server_is_overloaded"


@pytest.mark.parametrize("stream", [False, True])
async def test_context_l4_a_prompt_too_long_to_go_on_goes_out_once_more_without_the_tool(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call()), refuses(400, TOO_LONG), says("Without."))
    answer = await one.ask()
    assert answer.status == 200
    assert one.messages[-1]["content"] == "Without."
    asked, _, again = (each.document for each in upstream.calls[1:])
    assert again["tools"] == TOOLS
    assert again == asked | {"tools": TOOLS}
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert NAME not in json.dumps(one.sent()[-1]), "nothing came of the look-up"
    assert upstream.calls[-1].document["tools"] == [*TOOLS, TOOL]


async def test_an_answer_that_breaks_off_after_a_look_up_ends_as_any_other(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream, stream=True)
    upstream.play(calls(call()), dies_after(2, "hang_up"))
    answer = await one.ask()
    assert answer.documents[-1]["error"]["code"] == "upstream_truncated"
    assert b"t0 " in answer.body
    assert outcomes(await one.gateway.rows())[-1] == ("recall", Outcome.TRUNCATED)
    await one.gateway.quiet()


async def test_a_call_that_is_cut_by_the_output_limit_is_left_out(
    upstream: Upstream, start_gateway: Start
) -> None:
    for stream in (False, True):
        one = await agent(start_gateway, upstream, stream=stream)
        upstream.play(calls(call('{"query": "dep'), text="I", reason="length"))
        before = len(upstream.calls)
        answer = await one.ask()
        assert len(upstream.calls) == before + 1
        assert NAME.encode() not in answer.body
        documents = answer.documents if stream else [answer.document]
        reasons = [choice["finish_reason"] for document in documents for choice in document["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]


async def test_what_is_left_of_the_output_is_asked_for(upstream: Upstream, start_gateway: Start) -> None:
    one = await agent(start_gateway, upstream)
    one.options = {"max_tokens": 100}
    upstream.play(calls(call(), completion=30), calls(call(id_="c2"), completion=90), says("x"))
    await one.ask()
    assert [each.document["max_tokens"] for each in upstream.calls[1:]] == [100, 70, 1]


async def test_a_client_that_leaves_after_a_look_up_ends_the_further_call(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call()), streams_until_aborted("a ", "b "))
    body = {"model": MODEL, "messages": one.messages, "tools": TOOLS, "stream": True}
    async with one.gateway.wire() as wire:
        wire.request(body=body, headers=(bearer(),))
        await wire.head()
        seen = b""
        while b"b " not in seen:
            seen += await wire.chunk()
        wire.reset()
    await one.gateway.quiet()
    last = upstream.calls[-1]
    assert [last.engine_id] in upstream.abort_calls
    rows = await one.gateway.rows()
    assert outcomes(rows)[-2:] == [
        ("answer", Outcome.COMPLETED),
        ("recall", Outcome.CLIENT_DISCONNECTED),
    ]


async def test_a_client_that_leaves_during_the_search_costs_no_further_call(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    searching, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object, **__: object) -> None:
        searching.set()
        await go_on.wait()

    one.gateway.services.recall.query = slow  # type: ignore[method-assign]  # a stand-in
    upstream.play(calls(call()))
    body = {"model": MODEL, "messages": one.messages, "tools": TOOLS, "stream": True}
    async with one.gateway.wire() as wire:
        wire.request(body=body, headers=(bearer(),))
        await searching.wait()
        wire.reset()
    await until(lambda: all(task_reply_gone(one.gateway)))
    go_on.set()
    await one.gateway.quiet()
    assert len(upstream.calls) == 2
    assert outcomes(await one.gateway.rows())[-1] == ("answer", Outcome.COMPLETED)


def task_reply_gone(gateway: Gateway) -> list[bool]:
    """Whether each connection of the gateway is closed."""
    return [connection.transport.is_closing() for connection in gateway.state.connections]


async def test_a_store_that_fails_keeps_no_answer_back(upstream: Upstream, start_gateway: Start) -> None:
    one = await agent(start_gateway, upstream)
    forms = one.gateway.services.forms
    kept = forms.answer

    async def fails(tenant: str, ask: Ask, now_us: int, deadline: float) -> dict[bytes, bytes]:
        if NAME.encode() in b"".join(map(bytes, ask.claims.values())):
            raise LedgerError("gone")
        return await kept(tenant, ask, now_us, deadline)

    forms.answer = fails  # type: ignore[method-assign]  # a stand-in
    upstream.play(calls(call()), says("It is kx."))
    assert (await one.ask()).status == 200
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert NAME not in json.dumps(one.sent()[-1])
    metrics = await one.gateway.metrics()
    assert metrics['ctxgate_context_dropped_total{reason="store"}'] == 1


async def test_what_was_found_goes_with_its_task(upstream: Upstream, start_gateway: Start) -> None:
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call()), says("It is kx."))
    await one.ask()
    (task,) = {row.opened.task for row in await one.gateway.rows()}
    answer = await one.gateway.get(f"/v1/context?task={task}", method="DELETE")
    assert answer.status == 200
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert NAME not in json.dumps(one.sent()[-1])
    assert one.sent()[-1] == one.messages[:-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_shutdown_settles_a_further_call(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call()), by_hand)
    body = {"model": MODEL, "messages": one.messages, "tools": TOOLS, "stream": stream}
    async with one.gateway.wire() as wire:
        wire.request(body=body, headers=(bearer(),))
        exchange = await upstream.next_call()
        for attempt in list(one.gateway.services.attempts):
            attempt.call_off()
        await exchange.until_left()
        if exchange.streams:
            exchange.head()
            exchange.end_aborted(completion=0)
        else:
            exchange.answer("abort", "", completion=0)
        answer = await wire.answer()
    assert b"shutting_down" in answer.body or b"shutting down" in answer.body
    await one.gateway.quiet()
    assert outcomes(await one.gateway.rows())[-1] == ("recall", Outcome.SHUTDOWN)


async def test_context_q3_text_is_not_kept_back_only_the_call_is(
    upstream: Upstream, start_gateway: Start
) -> None:
    """Each step of the model is seen before its next one is made."""
    one = await agent(start_gateway, upstream)
    upstream.play(by_hand, by_hand)
    body = {"model": MODEL, "messages": one.messages, "tools": TOOLS, "stream": True}
    seen = b""
    async with one.gateway.wire() as wire:
        wire.request(body=body, headers=(bearer(),))

        async def until_seen(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += await wire.chunk()

        first = await upstream.next_call()
        first.head()
        first.chunk({"role": "assistant", "content": ""})
        first.text("I look. ")
        answer = await wire.head()
        await until_seen(b"I look. ")
        first.chunk({"tool_calls": [{"index": 0, **call()}]})
        first.text("Wait. ")
        await until_seen(b"Wait. ")
        first.chunk({}, "tool_calls")
        first.usage_chunk()
        first.done()
        second = await upstream.next_call()
        second.head()
        second.chunk({"role": "assistant", "content": ""})
        second.text("It is kx.")
        await until_seen(b"It is kx.")
        second.chunk({}, "stop")
        second.usage_chunk()
        second.done()
        answer = await wire.rest(answer)
    seen += answer.body
    assert NAME.encode() not in seen
    assert seen.endswith(b"data: [DONE]\n\n")
    assert seen.count(b'"role"') == 1
    assert seen.count(b'"finish_reason": "') + seen.count(b'"finish_reason":"') == 1


async def test_context_q3_an_answer_is_not_empty_because_a_call_was_taken_out(
    upstream: Upstream, start_gateway: Start
) -> None:
    """A model that does not stop looking up is asked without the tool in the end."""
    one = await agent(start_gateway, upstream)
    upstream.play(*(calls(call(id_=f"c{number}")) for number in range(5)), says("I give up."))
    await one.ask()
    assert one.messages[-1]["content"] == "I give up."
    assert upstream.calls[-1].document["tools"] == TOOLS
