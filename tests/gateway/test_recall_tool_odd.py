"""Odd engines and clients around `context_recall`: what they send fails nothing and leaks nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ctxgate.compression.recall_tool import DEFINITION, NAME
from ctxgate.compression.recent import Recent
from ctxgate.gateway.ledger import LedgerError, Outcome
from support.behaviours import plays
from support.gateway import MODEL, bearer
from support.looking_up import CONTEXT, NEEDLE, QUERY, TASK, TOOLS, Agent, call, calls, extends, says, whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from ctxgate.compression.ask import Ask
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

TOOL = json.loads(DEFINITION)


async def agent(start: Start, upstream: Upstream, *, stream: bool = False) -> Agent:
    found = Agent(await start(upstream, context=CONTEXT), upstream, stream)
    await found.begin()
    return found


def raw_messages(exchange: Exchange) -> list[bytes]:
    """The messages of a call, byte for byte."""
    body = msgspec.json.decode(exchange.body, type=dict[str, msgspec.Raw])
    return [bytes(each) for each in msgspec.json.decode(body["messages"], type=list[msgspec.Raw])]


async def test_arguments_that_are_an_object_are_read_like_their_text(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    made = call()
    made["function"]["arguments"] = json.loads(QUERY)
    upstream.play(whole(lambda _: None, made), says("It is kx."))
    assert (await one.ask()).status == 200
    called, result = one.sent()[-1][-2:]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == json.loads(QUERY)
    assert NEEDLE in result["content"]


@pytest.mark.parametrize("ids", [("c", "c"), ("", ""), (None, None), ("r1", "r1")])
async def test_calls_without_ids_of_their_own_get_some(
    upstream: Upstream, start_gateway: Start, ids: tuple[str | None, str | None]
) -> None:
    """Each result answers its own call, in every later prompt too."""
    one = await agent(start_gateway, upstream)
    made = [call() | {"id": ids[0]}, call('{"query": "the listing"}') | {"id": ids[1]}]
    upstream.play(whole(lambda _: None, *made), says("It is kx."))
    assert (await one.ask()).status == 200
    called, *results = one.sent()[-1][-3:]
    named = [each["id"] for each in called["tool_calls"]]
    assert len(set(named)) == 2
    assert all(named)
    assert [each["tool_call_id"] for each in results] == named
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert extends(one.sent())


async def test_an_error_inside_an_answer_with_a_call_ends_it(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)

    def fails(document: dict[str, Any]) -> None:
        document["error"] = {"message": "the engine died", "code": 500}

    upstream.play(whole(fails, call()))
    answer = await one.ask()
    assert answer.document["error"]["message"] == "the engine died"
    assert NAME.encode() not in answer.body
    assert len(upstream.calls) == 2
    (row,) = [row.settled for row in await one.gateway.rows() if row.settled.outcome != Outcome.COMPLETED]
    assert row.outcome == Outcome.UPSTREAM_ERROR
    await one.gateway.quiet()


async def test_calls_of_a_stream_that_numbers_none_are_told_apart(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream, stream=True)

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"role": "assistant", "tool_calls": [call("{}", "w1", "write"), call()]})
        exchange.chunk({}, "tool_calls")
        exchange.usage_chunk()
        exchange.done()

    upstream.play(plays(write))
    answer = await one.ask()
    assert NAME.encode() not in answer.body
    assert [each["id"] for each in one.messages[-1]["tool_calls"]] == ["w1"]
    upstream.play(says("Done."))
    await one.ask({"role": "tool", "tool_call_id": "w1", "content": "ok"})
    assert [each["id"] for each in one.sent()[-1][-3]["tool_calls"]] == ["w1", "c1"]


async def test_a_tool_of_that_name_is_the_clients_however_it_is_escaped(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, context=CONTEXT)
    named = {"type": "function", "function": {"name": "XX", "parameters": {"type": "object"}}}
    body = json.dumps({"model": MODEL, "messages": [TASK], "tools": [*TOOLS, named]})
    raw = body.replace("XX", "context\\u005frecall").encode()
    upstream.play(calls(call()))
    answer = await gateway.post(raw)
    assert upstream.calls[0].body == raw
    (made,) = answer.document["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == NAME, "it is the client's to answer"


async def test_a_client_that_adds_a_tool_of_that_name_gets_its_calls(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    one.options = {"tools": [*TOOLS, {"type": "function", "function": {"name": NAME, "parameters": {}}}]}
    upstream.play(calls(call()))
    answer = await one.ask()
    assert answer.document["choices"][0]["message"]["tool_calls"] == [call()]
    assert upstream.calls[-1].document["tools"] == one.options["tools"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_single_token_of_a_call_is_told(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    tokens = {"content": [{"token": NAME, "logprob": -1.0}]}

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        for at, made in enumerate((call(), call("{}", "w1", "write"))):
            said = {"content": [{"token": made["function"]["name"], "logprob": -1.0}]}
            part = {"index": 0, "delta": {"tool_calls": [{"index": at, **made}]}, "logprobs": said}
            exchange.event(exchange.shell([part | {"finish_reason": None}]))
        exchange.chunk({}, "tool_calls")
        exchange.done()

    def told(document: dict[str, Any]) -> None:
        document["choices"][0]["logprobs"] = tokens

    upstream.play(plays(write) if stream else whole(told, call(), call("{}", "w1", "write")))
    answer = await one.ask()
    assert answer.status == 200
    assert NAME.encode() not in answer.body
    assert one.messages[-1]["tool_calls"][0]["function"]["name"] == "write"


async def test_who_asks_for_single_tokens_begins_without_it(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, context=CONTEXT)
    body = {"model": MODEL, "messages": [TASK], "tools": TOOLS, "logprobs": True}
    await gateway.post(body)
    assert upstream.calls[0].document == body


async def test_a_store_that_is_down_takes_nothing_out_of_a_prompt(
    upstream: Upstream, start_gateway: Start
) -> None:
    """What a process remembers stays in the prompt: the tool, and the calls that were answered."""
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call()), says("It is kx."))
    await one.ask()
    forms = one.gateway.services.forms
    answers = forms.answer

    async def fails(tenant: str, ask: Ask, now_us: int, deadline: float) -> dict[bytes, bytes]:
        raise LedgerError("gone")

    forms.answer = fails  # type: ignore[method-assign]  # a stand-in
    for said in ("Sure.", "Yes."):
        upstream.play(says(said))
        assert (await one.ask({"role": "user", "content": "Sure?"})).status == 200
    forms.answer = answers  # type: ignore[method-assign]  # the real one
    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert extends(one.sent())
    assert all(each.document["tools"] == [*TOOLS, TOOL] for each in upstream.calls)
    assert sum(NAME in json.dumps(each) for each in one.sent()[-1]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_hidden_rounds_are_the_same_bytes_in_every_later_turn(
    upstream: Upstream, start_gateway: Start, tmp_path: Path, stream: bool
) -> None:
    """After memory was dropped, after another process took over, and with calls beside the client's."""
    store = tmp_path / "one.db"
    gateway = await start_gateway(upstream, context=CONTEXT, store=store)
    one = Agent(gateway, upstream, stream)
    await one.begin()
    for turn in range(14):
        own = call(f'{{"query": "deploy key {turn}"}}', f"own{turn}")
        if turn % 3 == 0:
            upstream.play(calls(own, text=f"Look {turn}. ", thought="Hm."), says(f"Said {turn}."))
            more = {"role": "user", "content": f"Go on {turn}."}
        elif turn % 3 == 1:
            upstream.play(calls(call("{}", f"w{turn}", "write"), own))
            more = {"role": "tool", "tool_call_id": f"w{turn}", "content": "ok"}
        else:
            upstream.play(calls(own), calls(call("{}", f"w{turn}", "write"), text="So."))
            more = {"role": "tool", "tool_call_id": f"w{turn}", "content": "ok"}
        assert (await one.ask()).status == 200
        one.messages.append(more)
        if turn == 4:
            one.gateway.services.context.tool.memory.rounds = Recent(1)  # nothing stays in it
        if turn == 8:
            await one.gateway.stop()
            again = await start_gateway(upstream, context=CONTEXT, store=store)
            one = Agent(again, upstream, stream, one.messages)
    sent = [raw_messages(exchange) for exchange in upstream.calls]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before
    assert sum(b'"own' in each for each in sent[-1]) >= 26, "each look-up's call and its result"


async def test_a_huge_original_comes_back_within_its_bound(upstream: Upstream, start_gateway: Start) -> None:
    """Four megabytes without a space, asked for by name and by id."""
    context = replace(CONTEXT, recall_tokens=500)
    gateway = await start_gateway(upstream, context=context)
    one = Agent(gateway, upstream)
    upstream.play(calls(call("{}", "r1", "read")))
    await one.ask()
    huge = "x" * 2_000_000 + NEEDLE.replace(" ", "_") + "y" * 2_000_000
    one.messages.append({"role": "tool", "tool_call_id": "r1", "content": huge})
    upstream.play(calls(call('{"query": "kx-77421-zulu"}')), says("Found."))
    assert (await one.ask()).status == 200
    reference = one.sent()[1][2]["content"].rpartition("id ")[2][:24]
    upstream.play(calls(call(json.dumps({"id": reference}), "c2")), says("Read."))
    assert (await one.ask({"role": "user", "content": "Read it."})).status == 200
    results = [each["content"] for each in one.sent()[-1] if each.get("tool_call_id") in ("c1", "c2")]
    assert len(results) == 2
    assert all(len(text.encode()) < 500 * 3 + 600 for text in results)
    assert f"[tool {reference}]" in results[1]


async def test_a_call_by_the_id_of_another_conversation_finds_nothing(
    upstream: Upstream, start_gateway: Start
) -> None:
    """The same team, another run; and an id of another team."""
    one = await agent(start_gateway, upstream)
    upstream.play(says("Hm."))
    await one.ask()
    reference = one.sent()[-1][2]["content"].rpartition("id ")[2][:24]
    for secret in ((), (("authorization", "Bearer cg-beta-0123456789-0123456789-01234567890"),)):
        head = secret or (bearer(),)
        task = {"role": "user", "content": f"Another task {len(secret)}."}
        upstream.play(calls(call("{}", "z1", "read")))
        await one.gateway.post({"model": MODEL, "messages": [task], "tools": TOOLS}, headers=head)
        first = {"role": "assistant", "content": None, "tool_calls": [call("{}", "z1", "read")]}
        long = {"role": "tool", "tool_call_id": "z1", "content": "other words\n" * 400}
        upstream.play(calls(call(json.dumps({"id": reference, "query": "deploy key"}))), says("No."))
        body = {"model": MODEL, "messages": [task, first, long], "tools": TOOLS}
        assert (await one.gateway.post(body, headers=head)).status == 200
        sent = upstream.calls[-1].document["messages"]
        assert sent[-1]["tool_call_id"] == "c1"
        assert NEEDLE not in json.dumps(sent)
