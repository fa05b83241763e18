"""Misses that have no request before them in a conversation, or only one to be compared as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway import routing
from ctxgate.routing.choose import RouteDecision
from support.gateway import BETA, MODEL, bearer
from support.missing import LONG, answers, booked, send, told, turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("task", ["x-ctxgate-task", None])
async def test_a_completions_prompt_that_begins_otherwise_is_named_where_its_task_is(
    gateway: Gateway, upstream: Upstream, task: str | None
) -> None:
    """Without a task there is nothing that would lead from one text to another."""
    headers = [bearer(), *([(task, "t")] if task else [])]
    found = []
    for prompt, tokens in (("A" + LONG, 500), ("B" + LONG + "more", 501), ("Other. " * 300, 500)):
        upstream.script.append(answers(tokens, 0))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        found.append(told(await gateway.post(body, "/v1/completions", headers=headers))[1])
    # 2,520 of 2,527 bytes are held, 499 of 501 tokens: 496 are whole blocks.
    miss = "history_edited; detail=history_edited; field=prompt; avoidable=496"
    assert found == ["", miss if task else "", ""]
    second = (await booked(gateway))[1]
    assert (second is not None and (second.index, second.offset)) == ((0, 1) if task else False)


async def test_a_summary_of_as_many_messages_is_a_compaction(gateway: Gateway, upstream: Upstream) -> None:
    first, second = turn(4), turn(5)
    messages = second["messages"]
    second["messages"] = [messages[0], {"role": "user", "content": "In short: foxes."}, *messages[4:]]
    assert len(second["messages"]) == len(first["messages"])
    await send(gateway, upstream, first, 3_000, 0)
    answer = await send(gateway, upstream, second, 600, 16)
    assert told(answer)[1].startswith("compaction; detail=history_compacted; field=messages[1]; avoidable=")


def agent(number: int, system: str, **members: Any) -> dict[str, Any]:
    """The first request of a conversation of its own."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, **members}


TOOL = {"type": "function", "function": {"name": "look", "description": LONG, "parameters": {}}}
LATE = {"type": "function", "function": {"name": "late", "description": "Late.", "parameters": {}}}


async def test_the_first_request_of_a_conversation_is_explained_by_earlier_ones_of_its_head(
    gateway: Gateway, upstream: Upstream
) -> None:
    clock = "It is 2026-11-30T09:{:02}:00Z. " + LONG
    sent = [
        (agent(0, clock.format(0)), 600, 0, ""),
        (agent(1, clock.format(0)), 600, 592, ""),
        (
            agent(2, clock.format(7)),
            600,
            0,
            "system_changed; detail=volatile_in_head/clock; field=messages[0].content",
        ),
        (agent(3, clock.format(0)), 600, 592, ""),  # a head that is known is no change of another one
        (agent(4, LONG, tools=[TOOL]), 1_200, 0, ""),  # another agent
        (agent(5, LONG, tools=[TOOL, LATE]), 1_230, 0, "tools_changed; detail=tools_changed; field=tools[1]"),
        (agent(6, LONG, tools=[LATE, TOOL]), 1_230, 0, "reordered; detail=tools_reordered; field=tools[0]"),
    ]
    for body, prompt, cached, miss in sent:
        answer = await send(gateway, upstream, body, prompt, cached)
        assert told(answer)[1].rpartition("; avoidable=")[0] == miss
    assert told(answer)[0] == "0"
    found = await booked(gateway)
    assert [one is not None for one in found] == [bool(miss) for *_, miss in sent]
    # All of the head but the clock, of 600 tokens to two blocks and the question: not more.
    assert found[2] is not None
    assert 512 <= (found[2].avoidable_tokens or 0) <= 592


async def test_a_head_that_is_gone_from_a_replica_is_missed_by_the_next_conversation(
    gateway: Gateway, upstream: Upstream
) -> None:
    await send(gateway, upstream, agent(0, LONG), 600, 0)
    answer = await send(gateway, upstream, agent(1, LONG), 600, 0)
    expected, miss = told(answer)
    assert 544 <= int(expected) <= 592
    assert miss == f"expired; avoidable={expected}"  # nothing else was written there


async def test_a_first_request_misses_nothing_where_no_version_of_its_head_was(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(upstream, other_upstream)
    chosen = iter(("standard-0", "standard-1", "standard-0"))
    monkeypatch.setattr(
        routing, "choose", lambda *_, **__: RouteDecision("standard", next(chosen), "scripted", ())
    )
    clock = "It is 2026-11-30T09:{:02}:00Z. " + LONG
    await send(gateway, upstream, agent(0, clock.format(0)), 600, 0)
    await send(gateway, other_upstream, agent(1, clock.format(1)), 600, 0)
    await send(gateway, upstream, agent(2, clock.format(2)), 600, 0)
    assert [miss is not None for miss in await booked(gateway)] == [False, False, False]


async def test_heads_of_other_teams_explain_nothing(gateway: Gateway, upstream: Upstream) -> None:
    clock = "It is 2026-11-30T09:{:02}:00Z. " + LONG
    await send(gateway, upstream, agent(0, clock.format(0)), 600, 0)
    upstream.script.append(answers(600, 0))
    answer = await gateway.post(agent(1, clock.format(1)), headers=[bearer(BETA)])
    assert told(answer)[1] == ""
    assert await booked(gateway) == [None, None]


async def test_of_several_choices_no_hit_is_told_and_none_is_missed(
    gateway: Gateway, upstream: Upstream
) -> None:
    """The figure is one choice's, of those that found what the first had just written."""
    await send(gateway, upstream, turn(0), 3_000, 0)
    for cached in (3_088, None):
        assert told(await send(gateway, upstream, turn(1, n=2), 3_100, cached))[1] == ""
    assert await booked(gateway) == [None, None, None]
