"""The tool `context_recall`: offered to the model, answered by the gateway, never seen by the client."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.recall_tool import DEFINITION, NAME
from ctxgate.compression.validity import pairing_faults
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.recall_answers import NOTHING, TOO_MANY, UNREADABLE
from support.gateway import BETA, MODEL, bearer, until
from support.looking_up import (
    CONTEXT,
    NEEDLE,
    READ,
    RESULT,
    TASK,
    TOOLS,
    Agent,
    call,
    calls,
    extends,
    says,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

TOOL = json.loads(DEFINITION)


async def agent(start: Start, upstream: Upstream, *, stream: bool = False, **options: object) -> Agent:
    gateway = await start(upstream, context=CONTEXT)
    found = Agent(gateway, upstream, stream, options=options)
    await found.begin()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_look_up_is_answered_and_the_client_sees_one_answer(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(
        calls(call(), text="I look. ", prompt=100, completion=20, cached=64),
        says("It is kx.", prompt=200, completion=4, cached=96),
    )
    answer = await one.ask()
    assert answer.status == 200
    assert NAME.encode() not in answer.body
    assert b'"c1"' not in answer.body
    documents = answer.documents if stream else [answer.document]
    assert len({document["id"] for document in documents}) == 1
    assert documents[0]["id"] == f"chatcmpl-{upstream.calls[1].request_id}"
    reasons = [choice["finish_reason"] for document in documents for choice in document["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert one.messages[-1] == {"role": "assistant", "content": "I look. It is kx."}
    usage = documents[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (300, 24, 324)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 160
    # 36 + 104 uncached at 1000, 160 cached at 100 and 24 of output at 2000 nano-dollars.
    assert usage["cost"] == pytest.approx((140_000 + 16_000 + 48_000) / 10**9, abs=1e-12)
    if stream:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(b"[DONE]") == 1
    else:
        assert answer.header("x-ctxgate-cost") == "0.000204"

    first, second = upstream.calls[1].document, upstream.calls[2].document
    assert first["tools"][-1] == second["tools"][-1] == TOOL
    assert len(first["tools"]) == 3
    assert second["messages"][: len(first["messages"])] == first["messages"]
    called, result = second["messages"][len(first["messages"]) :]
    assert called["content"] == "I look. "
    assert [each["function"]["name"] for each in called["tool_calls"]] == [NAME]
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")
    assert NEEDLE in result["content"]
    assert NEEDLE not in json.dumps(first)

    upstream.play(says("Done."))
    await one.ask({"role": "user", "content": "Go on."})
    assert extends(one.sent())
    assert one.sent()[-1][-2:] == [
        {"role": "assistant", "content": "It is kx."},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_attempt_is_a_row_and_the_ledger_adds_up_to_what_the_engine_counted(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call(), prompt=100, completion=20, cached=64), says("Yes."))
    await one.ask()
    rows = sorted(await one.gateway.rows(), key=lambda row: row.opened.opened_at_us)
    assert [row.opened.purpose for row in rows] == ["answer", "answer", "recall"]
    assert rows[1].opened.request_id == rows[2].opened.request_id != rows[0].opened.request_id
    assert [row.opened.attempt_number for row in rows] == [1, 1, 2]
    assert {row.opened.task for row in rows} == {rows[0].opened.task}
    settled = [row.settled for row in rows]
    assert [each.outcome for each in settled if each is not None] == [Outcome.COMPLETED] * 3
    usages = [each.usage for each in settled if each is not None]
    assert [each.prompt for each in usages] == [40, 100, 40]
    assert [each.output.value for each in usages] == [3, 20, 3]
    await one.gateway.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_beside_the_clients_are_put_back_where_they_were_made(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(calls(call("{}", "w1", "write"), call(), call("{}", "w2", "read"), text="Both."))
    answer = await one.ask()
    assert NAME.encode() not in answer.body
    assert len(upstream.calls) == 2, "the client has to answer its own calls first"
    made = one.messages[-1]
    assert made["content"] == "Both."
    assert [(each["id"], each["function"]["name"]) for each in made["tool_calls"]] == [
        ("w1", "write"),
        ("w2", "read"),
    ]
    documents = answer.documents if stream else [answer.document]
    reasons = [choice["finish_reason"] for document in documents for choice in document["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]

    upstream.play(says("Done."))
    results = [{"role": "tool", "tool_call_id": id_, "content": "ok"} for id_ in ("w1", "w2")]
    await one.ask(*results)
    sent = one.sent()[-1]
    assert [each["id"] for each in sent[-4]["tool_calls"]] == ["w1", "c1", "w2"]
    assert sent[-3]["tool_call_id"] == "c1"
    assert NEEDLE in sent[-3]["content"]
    assert sent[-2:] == results
    upstream.play(says("Yes."))
    await one.ask({"role": "user", "content": "Sure?"})
    assert extends(one.sent()), "and stay there"


@pytest.mark.parametrize("stream", [False, True])
async def test_context_c4_another_process_puts_back_the_same_with_what_was_thought(
    upstream: Upstream, start_gateway: Start, stream: bool, tmp_path: Path
) -> None:
    gateway = await start_gateway(upstream, context=CONTEXT, store=tmp_path / "one.db")
    one = Agent(gateway, upstream, stream)
    await one.begin()
    upstream.play(calls(call(), text="I look. ", thought="Where is it?"), says("It is kx."))
    await one.ask()
    hidden = one.sent()[-1]
    assert hidden[-2]["reasoning_content"] == "Where is it?"
    assert one.messages[-1]["reasoning_content"] == "Where is it?"
    await gateway.stop()

    again = await start_gateway(upstream, context=CONTEXT, store=tmp_path / "one.db")
    other = Agent(again, upstream, stream, messages=list(one.messages))
    upstream.play(says("Done."))
    await other.ask({"role": "user", "content": "Go on."})
    assert other.sent()[-1][: len(hidden)] == hidden
    assert other.sent()[-1][len(hidden)]["content"] == "It is kx."
    assert "Where" not in other.sent()[-1][len(hidden)].get("reasoning_content", "")

    edited = [*one.messages[:-1], {"role": "assistant", "content": "I look. It was ky."}]
    third = Agent(again, upstream, stream, messages=edited)
    upstream.play(says("Done."))
    await third.ask({"role": "user", "content": "Go on."})
    assert NAME not in json.dumps(third.sent()[-1])
    assert third.sent()[-1][3:] == third.messages[3:-1]


async def test_a_look_up_without_thinking_returned_is_put_back_all_the_same(
    upstream: Upstream, start_gateway: Start
) -> None:
    """Many clients drop what a model thought, and make ids of their own."""
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call(), thought="Hm."), calls(call('{"a": 1}', "w1", "write")))
    await one.ask()
    (kept,) = one.messages[-1]["tool_calls"]
    kept["id"] = "renamed"
    kept["function"]["arguments"] = '{"a":1}'
    one.messages[-1] = {"role": "assistant", "content": "", "tool_calls": [kept]}
    upstream.play(says("Done."))
    await one.ask({"role": "tool", "tool_call_id": "renamed", "content": "ok"})
    sent = one.sent()
    assert sent[3][: len(sent[2])] == sent[2]
    assert sent[3][len(sent[2]) :] == one.messages[-3:-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_look_ups_of_one_answer_are_bounded(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    one = await agent(start_gateway, upstream, stream=stream)
    upstream.play(*(calls(call(id_=f"c{number}")) for number in range(9)))
    answer = await one.ask()
    assert answer.status == 200
    assert len(upstream.calls) == 7, "the first request, and six for this answer"
    offered = [TOOL in each.document["tools"] for each in upstream.calls[1:]]
    assert offered == [True, True, True, True, True, False], "a model that heeds a refusal misses no cache"
    results = [each["content"] for each in one.sent()[-1] if each["role"] == "tool"][1:]
    assert [NEEDLE in text for text in results] == [True, False, False, False, False]
    assert results[-2:] == [TOO_MANY] * 2
    assert one.messages[-1].get("tool_calls") is None
    documents = answer.documents if stream else [answer.document]
    reasons = [choice["finish_reason"] for document in documents for choice in document["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert [row.opened.purpose for row in await one.gateway.rows()].count("recall") == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{nonsense", UNREADABLE),
        ("[]", UNREADABLE),
        ('{"query": ""}', UNREADABLE),
        ('{"query": "deploy", "id": "0123456789abcdef01234567"}', NOTHING),
        ('{"query": "zebra unicorn galaxy"}', NOTHING),
    ],
)
async def test_context_q2_a_search_that_finds_nothing_says_so_and_fails_nothing(
    upstream: Upstream, start_gateway: Start, arguments: str, told: str
) -> None:
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call(arguments)), says("So be it."))
    assert (await one.ask()).status == 200
    assert one.messages[-1]["content"] == "So be it."
    called, result = one.sent()[-1][-2:]
    assert result["content"] == told
    assert isinstance(json.loads(called["tool_calls"][0]["function"]["arguments"]), dict)


async def test_a_message_is_had_by_the_id_that_stands_in_the_prompt(
    upstream: Upstream, start_gateway: Start
) -> None:
    one = await agent(start_gateway, upstream)
    upstream.play(says("Hm."))
    await one.ask()
    (reference,) = re.findall(r"[0-9a-f]{24}", one.sent()[-1][2]["content"])
    upstream.play(calls(call(json.dumps({"query": "", "id": reference}))), says("Ah."))
    await one.ask({"role": "user", "content": "Look at it."})
    text = one.sent()[-1][-1]["content"]
    assert f"[tool {reference}]" in text
    assert "0000 nothing of note" in text
    assert len(text) < 400 * 3 + 600


async def test_recall_fails_and_the_answer_goes_on(upstream: Upstream, start_gateway: Start) -> None:
    one = await agent(start_gateway, upstream)

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret of the prompt")

    one.gateway.services.recall.query = broken  # type: ignore[method-assign]  # a defect
    upstream.play(calls(call()), says("Anyway."))
    assert (await one.ask()).status == 200
    assert one.messages[-1]["content"] == "Anyway."
    assert one.sent()[-1][-1]["content"] == NOTHING


async def test_context_p3_teams_never_see_each_others_messages(
    upstream: Upstream, start_gateway: Start
) -> None:
    """The same conversation of another team: it has not sent the long result, and finds nothing of it."""
    one = await agent(start_gateway, upstream)
    upstream.play(calls(call()), says("It is kx."))
    await one.ask()
    assert NEEDLE in json.dumps(one.sent()[-1])
    body = {"model": MODEL, "tools": TOOLS}
    upstream.play(calls(call("{}", "r1", "read")))
    await one.gateway.post(body | {"messages": [TASK]}, headers=(bearer(BETA),))
    upstream.play(calls(call()), says("Nothing."))
    result = {"role": "tool", "tool_call_id": "r1", "content": "other lines\n" * 400}
    await one.gateway.post(body | {"messages": [TASK, READ, result]}, headers=(bearer(BETA),))
    assert NEEDLE not in json.dumps(one.sent()[-2:])
    history = [*one.messages, {"role": "user", "content": "Go on."}]
    upstream.play(says("Done."))
    await one.gateway.post(body | {"messages": history}, headers=(bearer(BETA),))
    assert NAME not in json.dumps(one.sent()[-1]), "what is hidden in one team's is not in another's"


async def test_context_p1_only_what_this_run_left_out_is_found(
    upstream: Upstream, start_gateway: Start
) -> None:
    """Two runs of one team begin alike and share a root; the second has read something else."""
    one = await agent(start_gateway, upstream)
    upstream.play(says("Hm."))
    await one.ask()
    other = Agent(one.gateway, upstream)
    other.messages += [READ, {**RESULT, "content": "another listing\n" * 300}]
    upstream.play(calls(call()), says("No."))
    await other.ask()
    assert NEEDLE not in json.dumps(one.sent()[-1])
    assert one.sent()[-1][-1]["role"] == "tool"


@pytest.mark.parametrize(
    "options",
    [
        {"tools": []},
        {"tools": [TOOL]},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"functions": []},
    ],
)
async def test_who_is_not_offered_it(
    upstream: Upstream, start_gateway: Start, options: dict[str, object]
) -> None:
    gateway = await start_gateway(upstream, context=CONTEXT)
    body = {"model": MODEL, "messages": [TASK], "tools": TOOLS, **options}
    await gateway.post(body)
    assert upstream.calls[0].document == body
    await gateway.post({"model": MODEL, "messages": [TASK, READ, RESULT], "tools": TOOLS})
    offered = upstream.calls[1].document["tools"] != TOOLS
    assert offered is False, "nor is a conversation that is under way"


async def test_gateways_l12_a_conversation_that_has_it_keeps_it(
    upstream: Upstream, start_gateway: Start
) -> None:
    """Otherwise the beginning of its prompt would change."""
    one = await agent(start_gateway, upstream)
    for options in ({"tool_choice": "none"}, {"response_format": {"type": "json_object"}}):
        one.options = options
        await one.ask({"role": "user", "content": "Go on."})
        assert upstream.calls[-1].document["tools"] == [*TOOLS, TOOL]


async def test_without_the_setting_nothing_is_offered(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, context=replace(CONTEXT, recall_tool=False))
    one = Agent(gateway, upstream)
    await one.begin()
    await one.ask()
    assert all(each.document["tools"] == TOOLS for each in upstream.calls)


async def test_context_a1_hidden_rounds_go_with_what_a_compaction_leaves_out(
    upstream: Upstream, start_gateway: Start
) -> None:
    """Every prompt is valid and extends the one before it but where a compaction began."""
    upstream.models = {"object": "list", "data": [{"id": "m", "max_model_len": 6000}]}
    context = replace(CONTEXT, tail_tokens=600, summarizer="off", summary_tokens=200, tool_results=False)
    gateway = await start_gateway(upstream, context=context)
    await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
    one = Agent(gateway, upstream)
    await one.begin()
    breaks = 0
    put_back = 0
    for number in range(24):
        prompt = sum(len(json.dumps(each)) for each in one.messages) // 4
        figures: dict[str, Any] = {"prompt": prompt, "cached": prompt // 2}
        looks_up = number % 3 == 0
        script = [calls(call(id_=f"own{number}"), text=f"Look {number}. ", **figures)] if looks_up else []
        upstream.play(*script, calls(call(f'{{"n": {number}}}', f"r-{number}", "read"), **figures))
        before = one.sent()[-1]
        answer = await one.ask()
        assert answer.status == 200
        for sent in one.sent()[-1 - looks_up :]:
            facts = [facts_of(json.dumps(each).encode()) for each in sent]
            assert not +pairing_faults(facts[:-1])
            assert sent[0] == TASK
            breaks += sent[: len(before)] != before
            before = sent
        put_back += sum(each.get("tool_calls", [{}])[0].get("id", "").startswith("own") for each in before)
        filler = f"file {number} holds " + "words " * 150
        one.messages.append({"role": "tool", "tool_call_id": f"r-{number}", "content": filler})
    metrics = await gateway.metrics()
    made = sum(value for name, value in metrics.items() if name.startswith("ctxgate_compactions_total"))
    assert made >= 2
    assert 1 <= breaks <= made
    assert put_back > 12, "most of them were in several prompts"
    assert "ctxgate_context_dropped_total" not in {
        name.split("{")[0] for name, value in metrics.items() if value and "invalid" in name
    }
