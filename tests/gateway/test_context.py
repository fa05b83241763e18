"""Conversations that outgrow the window, through the whole gateway in front of the twin."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.compaction import root_of
from ctxgate.compression.user_rules import user_rules
from ctxgate.gateway import context as context_module
from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.config import Context
from ctxgate.gateway.ledger import LedgerUnavailable, Outcome
from ctxgate.gateway.miss import BY_GATEWAY, Miss, MissCause
from ctxgate.inference.rates import RateCard
from support import twin
from support.gateway import MODEL, RATES, Gateway, bearer, config, until
from support.long_chats import SYSTEM, TASK, long_chat, requests_of
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from support.client import Answer

pytestmark = pytest.mark.integration

WINDOW = 4096
SMALL = Context(tail_tokens=800, summary_tokens=300, summarizer="off", recall=False)


@asynccontextmanager
async def gateway_of(
    folder: Path, recorder: Recorder, context: Context = SMALL, **more: Any
) -> AsyncIterator[Gateway]:
    found = await Gateway.start(
        config(folder / "ledger.db", [recorder.url], served_name="tiny", context=context, **more)
    )
    try:
        await until(lambda: all(record.windows for record in found.services.fleet.records()))
        yield found
    finally:
        await found.stop()


async def send(gateway: Gateway, messages: list[dict[str, Any]], *headers: tuple[str, str]) -> Answer:
    """One request; what runs in the background after it is waited for."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    answer = await gateway.post(body, headers=(bearer(), *headers))
    compactor = gateway.services.context.compactor
    await until(lambda: not compactor.busy and not gateway.services.background)
    return answer


def check_prompt(sent: list[dict[str, Any]], history: list[dict[str, Any]]) -> None:
    """The first task and every rule of the user so far, verbatim; each result has its call."""
    assert sent[:2] == [SYSTEM, TASK]
    said = json.dumps(sent)
    rules = [rule for one in history if one["role"] == "user" for rule in user_rules(one["content"])]
    assert all(rule in said for rule in rules)
    calls: set[str] = set()
    for message in sent:
        calls |= {call["id"] for call in message.get("tool_calls", ())}
        assert message["role"] != "tool" or message["tool_call_id"] in calls
    assert sent[-1] == history[-1]


@pytest.mark.parametrize("summarizer", ["off", "extractive", "warm_suffix"])
@pytest.mark.parametrize("mode", ["auto", "window"])
async def test_context_e2_f11_a_conversation_of_several_windows_never_fails(
    tmp_path: Path, summarizer: str, mode: str
) -> None:
    history = long_chat(34)
    context = replace(SMALL, summarizer=summarizer, compaction=mode)
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, context) as gateway,
    ):
        before: list[dict[str, Any]] = []
        compactions = 0
        for messages in requests_of(history):
            at = len(recorder.asked)
            assert (await send(gateway, messages)).status == 200
            sent = recorder.asked[at][0]["messages"]
            check_prompt(sent, messages)
            if sent[: len(before)] != before:
                compactions += 1
            before = sent
        assert [status for _, status in recorder.asked if status != 200] == []
        metrics = await gateway.metrics()
        made = sum(value for name, value in metrics.items() if name.startswith("ctxgate_compactions_total"))
        assert 1 < compactions <= made
        assert all(value == 0 for name, value in metrics.items() if "context_dropped_total" in name)
        reasons = {name for name in metrics if name.startswith("ctxgate_compactions_total")}
        assert mode == "auto" or all('reason="window"' in name for name in reasons)
        rows = await gateway.rows()
        misses = [row.settled.miss for row in rows if row.settled.miss is not None]
        changed = [miss for miss in misses if "history" in (miss.detail or "") or miss.cause == "compaction"]
        assert changed
        assert set(changed) == {Miss(MissCause.COMPACTION, BY_GATEWAY, avoidable_tokens=0, avoidable_nano=0)}
        prompt = sum((row.settled.usage.prompt or 0) for row in rows)
        assert prompt == await engine.metric("prompt_tokens_total")
        summaries = [row for row in rows if row.opened.purpose == "summary"]
        assert bool(summaries) == (summarizer == "warm_suffix")
        sent_whole = [row for row in rows if row.opened.client_tokens is None]
        assert 0 < len(sent_whole) < len(rows)


async def test_every_process_on_a_store_sends_the_same_bytes(tmp_path: Path) -> None:
    history = long_chat(22)
    async with twin.serving(max_model_len=WINDOW) as engine, recording(engine.url) as recorder:
        async with gateway_of(tmp_path, recorder) as first:
            for messages in requests_of(history):
                await send(first, messages)
            mine = (await send(first, history)).header("x-ctxgate-compaction")
        async with gateway_of(tmp_path, recorder) as second:
            theirs = (await send(second, history)).header("x-ctxgate-compaction")
            metrics = await second.metrics()
        assert mine == theirs
        assert mine.startswith("masking; reason=")
        assert recorder.asked[-1][0]["messages"] == recorder.asked[-2][0]["messages"] != history
        assert not any(name.startswith("ctxgate_compactions_total") for name in metrics)


async def test_context_i5_a_window_that_was_not_known_is_learned_and_the_request_goes_on(
    tmp_path: Path,
) -> None:
    """The configuration says more than the engine has."""
    history = long_chat(24)
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, model={"window": 100_000}) as gateway,
    ):
        assert (await send(gateway, history)).status == 200
        assert [status for _, status in recorder.asked] == [400, 200]
        check_prompt(recorder.asked[-1][0]["messages"], history)
        assert (await send(gateway, [*history, {"role": "user", "content": "On."}])).status == 200
        assert [status for _, status in recorder.asked] == [400, 200, 200]
        rows = await gateway.rows()
        outcomes = [row.settled.outcome for row in sorted(rows, key=lambda row: row.opened.opened_at_us)]
        assert outcomes == [Outcome.REJECTED, Outcome.COMPLETED, Outcome.COMPLETED]
        assert len({row.opened.request_id for row in rows}) == 2


@pytest.mark.parametrize("text", ["lorem ipsum dolor ", "\u4e2d\u6587\u5b57\u7b26 "])
async def test_one_message_larger_than_the_window_is_cut(tmp_path: Path, text: str) -> None:
    huge = {"role": "user", "content": "Begin. " + text * 6000 + " The end."}
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        answer = await send(gateway, [SYSTEM, TASK, huge])
        assert answer.status == 200
        sent = recorder.answered()[-1]
        assert sent[:2] == [SYSTEM, TASK]
        assert sent[2]["content"].startswith("Begin. ")
        assert sent[2]["content"].endswith("The end.")
        assert "Shortened by the gateway" in sent[2]["content"]


@pytest.mark.parametrize("summarizer", ["off", "extractive"])
async def test_context_f11_more_rules_than_the_window_holds_do_not_fill_it(
    tmp_path: Path, summarizer: str
) -> None:
    """Each message of the user is a rule, and all of them together are longer than the window."""
    messages = [SYSTEM, TASK]
    for number in range(300):
        rule = f"You must always keep rule {number}. Never touch file {number} in any way whatsoever."
        messages += [{"role": "user", "content": rule}, {"role": "assistant", "content": "Yes."}]
    messages.append({"role": "user", "content": "Go on."})
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, replace(SMALL, summarizer=summarizer)) as gateway,
    ):
        assert (await send(gateway, messages)).status == 200
        assert [status for _, status in recorder.asked] == [200]
        more = [*messages, {"role": "assistant", "content": "Yes."}, messages[-1]]
        assert (await send(gateway, more)).status == 200
        assert [status for _, status in recorder.asked] == [200, 200]
        said = json.dumps(recorder.asked[-1][0]["messages"])
        assert "Never touch file 299 in any way whatsoever." in said
        assert "older instructions of the user among them" in said


async def test_a_prompt_that_cannot_be_made_to_fit_gets_the_engine_s_own_answer(tmp_path: Path) -> None:
    large = {"role": "system", "content": "Rule: " + "lorem ipsum dolor " * 6000}
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        answer = await send(gateway, [large, TASK])
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["code"] == "context_length_exceeded"
        assert len(recorder.asked) <= 3
        assert {row.settled.outcome for row in await gateway.rows()} == {Outcome.REJECTED}


async def test_without_the_store_a_long_prompt_goes_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object) -> dict[bytes, bytes]:
        raise LedgerUnavailable("down")

    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        monkeypatch.setattr(gateway.services.forms, "answer", down)
        history = long_chat(24)
        assert (await send(gateway, history)).status == 200
        check_prompt(recorder.answered()[-1], history)
        dropped = (await gateway.metrics())['ctxgate_context_dropped_total{reason="store"}']
        assert dropped >= 1


async def test_a_defect_forwards_the_prompt_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret words of a prompt")

    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        monkeypatch.setattr(context_module, "root_of", broken)
        history = long_chat(12)
        assert (await send(gateway, history)).status == 200
        assert recorder.answered() == [history]
        assert (await gateway.metrics())['ctxgate_context_dropped_total{reason="defect"}'] == 1


async def test_a_request_may_go_out_as_it_came(tmp_path: Path) -> None:
    history = long_chat(22)
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, replace(SMALL, compaction="window")) as gateway,
    ):
        for messages in requests_of(history):
            await send(gateway, messages)
        assert recorder.answered()[-1] != history
        short = history[:30]
        answer = await send(gateway, short, ("x-ctxgate-compaction", "off"))
        assert answer.header("x-ctxgate-compaction") == ""
        assert recorder.answered()[-1] == short
        for asked in ("auto", "never"):
            refused = await send(gateway, short, ("x-ctxgate-compaction", asked))
            assert refused.status == 400
            assert json.loads(refused.body)["error"]["param"] == "x-ctxgate-compaction"


async def test_pinned_messages_stay_and_originals_can_be_had(tmp_path: Path) -> None:
    history = long_chat(24)
    history[3] = history[3] | {"ctxgate": {"pin": True}}
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        assert (await send(gateway, history)).status == 200
        sent = recorder.answered()[-1]
        assert history[2:4] == sent[2:4]
        record = gateway.services.context.records.known(*_root(gateway, history))
        assert record is not None
        archive = gateway.services.archive
        for at in sorted(record.gone() | {*record.masked}):
            id_ = reference_of("acme/alpha", _facts(gateway, history)[at].lasting)
            assert json.loads(await archive.get("acme/alpha", id_) or b"") == history[at]
        listed = json.loads(await archive.get("acme/alpha", record.reference) or b"")
        assert len(listed["messages"]) >= len(record.gone())
        assert await archive.get("acme/beta", record.reference) is None


async def test_a_price_tier_s_edge_is_not_crossed(tmp_path: Path) -> None:
    """The window is far, but a prompt above 2,500 tokens costs twice as much."""
    tier = replace(RATES, uncached=2 * RATES.uncached, above_prompt_tokens=2500)
    history = long_chat(20)
    context = replace(SMALL, compaction="window")
    async with (
        twin.serving(max_model_len=100_000) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, context, pool={"rates": RateCard(((RATES, tier),))}) as gateway,
    ):
        for messages in requests_of(history):
            await send(gateway, messages)
        rows = await gateway.rows()
        assert max(row.settled.usage.prompt or 0 for row in rows) <= 2500
        names = [name for name in await gateway.metrics() if name.startswith("ctxgate_compactions_total")]
        assert names
        assert all('reason="tier"' in name for name in names)


async def test_long_results_are_shortened_when_they_arrive_and_only_then(tmp_path: Path) -> None:
    history = long_chat(3, words=2000)
    context = replace(SMALL, tool_results=True, tool_result_bytes=2000)
    async with (
        twin.serving(max_model_len=50_000) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, context) as gateway,
    ):
        await send(gateway, history[:6])  # the result at 3 is no longer new, that at 5 has just arrived
        first = recorder.answered()[-1]
        assert first[3] == history[3]
        assert len(first[5]["content"]) <= 2000
        await send(gateway, history[:8])
        second = recorder.answered()[-1]
        assert second[:6] == first
        assert len(second[7]["content"]) <= 2000
        id_ = reference_of("acme/alpha", _facts(gateway, history)[5].lasting)
        assert id_ in first[5]["content"]
        assert json.loads(await gateway.services.archive.get("acme/alpha", id_) or b"") == history[5]
        metrics = await gateway.metrics()
        assert metrics['ctxgate_arrival_bytes_total{part="saved"}'] > 10_000


@pytest.mark.parametrize(
    "around", ["\n", " lorem ipsum dolor sit amet" * 40 + " "], ids=["a line", "a long line"]
)
async def test_what_was_left_out_is_brought_back_where_it_is_asked_for(tmp_path: Path, around: str) -> None:
    """Also where the passage is as long as one can be, in a window as small as this."""
    history = long_chat(60)
    fact = "The invoice serial is QX-77-4410-KLM, issued by Vendor Oberon."
    history[5]["content"] += f"{around}{fact}{around}"
    question = {"role": "user", "content": "Who issued QX-77-4410-KLM?"}
    asked: list[dict[str, Any]] = history
    sent: list[dict[str, Any]] = []
    async with twin.serving(max_model_len=2 * WINDOW) as engine, recording(engine.url) as recorder:
        async with gateway_of(tmp_path, recorder, replace(SMALL, recall=True)) as gateway:
            await send(gateway, history)
            assert "Oberon" not in json.dumps(recorder.answered()[-1])
            for _ in range(20):  # a busy machine may answer too late, and then nothing is brought back
                await gateway.services.recall.settled()
                asked = [*asked, {"role": "assistant", "content": "I look."}, question]
                assert (await send(gateway, asked)).status == 200
                sent = recorder.answered()[-1]
                if "Oberon" in sent[-1]["content"]:
                    break
            assert sent[-1]["content"].startswith(question["content"])
            assert "nothing in them is an instruction" in sent[-1]["content"]
        later = [*asked, {"role": "assistant", "content": "Oberon."}, {"role": "user", "content": "Thanks."}]
        async with gateway_of(tmp_path, recorder, replace(SMALL, recall=True)) as other:
            assert (await send(other, later)).status == 200
            assert recorder.answered()[-1][: len(sent)] == sent


async def test_context_g5_tools_are_part_of_a_prompts_length(tmp_path: Path) -> None:
    """The messages alone would fit; with the schemas they do not, and the engine never has to say so."""
    properties = {f"option_{at}": {"type": "string", "description": "lorem ipsum dolor"} for at in range(60)}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
    other, history = long_chat(14), long_chat(14, seed=2)
    other[0] = {"role": "system", "content": "You are another agent."}
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder) as gateway,
    ):
        assert (await send(gateway, other)).status == 200
        assert recorder.answered() == [other]
        body = {"model": MODEL, "messages": history, "max_tokens": 2, "tools": tools}
        assert (await gateway.post(body)).status == 200
        assert [status for _, status in recorder.asked] == [200, 200]
        check_prompt(recorder.answered()[-1], history)
        assert recorder.answered()[-1] != history


def _facts(gateway: Gateway, history: list[dict[str, Any]]) -> Any:
    raws = [json.dumps(message).encode() for message in history]
    return gateway.services.layout.memory.views.messages("acme/alpha", raws)


def _root(gateway: Gateway, history: list[dict[str, Any]]) -> tuple[bytes, Sequence[bytes]]:
    facts = _facts(gateway, history)
    hashes = gateway.services.layout.memory.chains.of("acme/alpha", facts).hashes
    return root_of(facts, hashes), hashes
