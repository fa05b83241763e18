"""What engines say of prompts that are too long, and how far that reaches: never to other conversations."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.validity import Invalid
from ctxgate.gateway import attempt, context_lengths, context_turn
from ctxgate.gateway.config import Context
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference import wire
from support.client import CHAT
from support.gateway import ALPHA, BETA, MODEL, Gateway, bearer, config, until
from support.long_chats import SYSTEM, TASK, long_chat
from support.strict_engine import StrictEngine, serving, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.client import Answer

pytestmark = pytest.mark.integration

SMALL = Context(tail_tokens=800, summary_tokens=300, summarizer="off", recall=False)


@asynccontextmanager
async def gateway_of(folder: Path, engine: StrictEngine, **more: Any) -> AsyncIterator[Gateway]:
    found = await Gateway.start(config(folder / "ledger.db", [engine.url], context=SMALL, **more))
    try:
        await until(lambda: all(record.windows for record in found.services.fleet.records()))
        yield found
    finally:
        await found.stop()


async def send(gateway: Gateway, messages: list[dict[str, Any]], key: str = ALPHA, **more: Any) -> Answer:
    """One request; what runs in the background after it is waited for."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2} | more
    answer = await gateway.post(body, headers=(bearer(key),))
    compactor = gateway.services.context.compactor
    await until(lambda: not compactor.busy and not gateway.services.background)
    return answer


def report(gateway: Gateway, window: int) -> None:
    """As a probe would have heard."""
    for record in gateway.services.fleet.records():
        record.windows = {MODEL: window}


@pytest.mark.parametrize(
    "role",
    [
        "x maximum context length is 1 tokens",
        "x This model's maximum context length is 300 tokens. However, your prompt contains 400 input tokens",
    ],
)
async def test_what_an_error_quotes_of_a_request_sets_no_window(tmp_path: Path, role: str) -> None:
    history = long_chat(20)
    async with serving(StrictEngine(100_000)) as engine, gateway_of(tmp_path, engine) as gateway:
        answer = await send(gateway, [{"role": role, "content": "a"}])
        assert (answer.status, role in json.loads(answer.body)["error"]["message"]) == (400, True)
        assert engine.statuses == [400]
        assert (await send(gateway, history, BETA)).status == 200
        assert engine.asked[-1][0] == history


async def test_a_window_is_learned_from_a_refusal_once_a_shorter_prompt_was_taken(
    tmp_path: Path,
) -> None:
    async with (
        serving(StrictEngine(4096)) as engine,
        gateway_of(tmp_path, engine, model={"window": 100_000}) as gateway,
    ):
        windows, model = gateway.services.context.windows, gateway.services.config.models[MODEL]
        pool = gateway.services.config.pools[model.pools[0]]
        large = {"role": "system", "content": "Rule: " + "lorem ipsum dolor " * 2000}
        assert (await send(gateway, [large, TASK])).status == 400
        assert windows.of(pool, model) == 100_000
        assert (await send(gateway, long_chat(30))).status == 200
        assert engine.statuses[-2:] == [400, 200]
        assert windows.of(pool, model) == 4096


async def test_a_larger_engine_in_the_same_place_gets_whole_prompts_again(tmp_path: Path) -> None:
    async with (
        serving(StrictEngine(4096)) as engine,
        gateway_of(tmp_path, engine, model={"window": 50_000}) as gateway,
    ):
        assert (await send(gateway, long_chat(30, seed=3))).status == 200
        assert engine.statuses == [400, 200]
        engine.window = 50_000
        report(gateway, 50_000)
        history = long_chat(60, seed=4)
        assert (await send(gateway, history)).status == 200
        assert engine.asked[-1] == (history, 200)


@pytest.mark.parametrize("output", [20_000, 19_900, 10**30])
@pytest.mark.parametrize("truncates", [False, True])
async def test_a_wrong_max_tokens_leaves_the_conversation_as_it_was(
    tmp_path: Path, output: int, truncates: bool
) -> None:
    history = long_chat(20)
    later = [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "On."}]
    async with serving(StrictEngine(20_000)) as engine, gateway_of(tmp_path, engine) as gateway:
        assert (await send(gateway, history)).status == 200
        before, engine.truncates = len(engine.asked), truncates
        answer = await send(gateway, history, max_tokens=output)
        assert (answer.status, engine.statuses[before:]) == (400, [400])
        assert f"you requested {output} output tokens" in json.loads(answer.body)["error"]["message"]
        assert (await send(gateway, later, max_tokens=10)).status == 200
        assert engine.asked[-1][0] == later


@pytest.mark.parametrize("truncates", [False, True])
async def test_an_answer_that_fits_behind_a_shorter_prompt_gets_one(tmp_path: Path, truncates: bool) -> None:
    history = long_chat(20)
    async with serving(StrictEngine(20_000)) as engine, gateway_of(tmp_path, engine) as gateway:
        engine.truncates = truncates
        assert (await send(gateway, history, max_tokens=16_000)).status == 200
        assert engine.statuses == [400, 200]
        assert tokens_of(engine.asked[-1][0]) <= 4000


async def test_an_answer_as_large_as_the_window_cuts_nothing_for_good(tmp_path: Path) -> None:
    history = [
        SYSTEM,
        {"role": "user", "content": "Port the service. " + "word " * 1600},
        {"role": "assistant", "content": "fine " * 200},
        {"role": "user", "content": "go on"},
    ]
    later = [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "On."}]
    async with serving(StrictEngine(4096)) as engine, gateway_of(tmp_path, engine) as gateway:
        assert (await send(gateway, history, max_tokens=4096)).status == 400
        assert (await send(gateway, later)).status == 200
        assert engine.asked[-1][0] == later


async def test_a_request_that_fails_anyway_keeps_no_record(tmp_path: Path) -> None:
    history = [{"role": "system", "content": "Rule: " + "lorem ipsum dolor " * 1500}, *long_chat(12)[1:]]
    later = [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "On."}]
    async with serving(StrictEngine(4096)) as engine, gateway_of(tmp_path, engine) as gateway:
        assert (await send(gateway, history)).status == 400
        assert {row.settled.outcome for row in await gateway.rows()} == {Outcome.REJECTED}
        engine.window = 50_000
        report(gateway, 50_000)
        assert (await send(gateway, later)).status == 200
        assert engine.asked[-1][0] == later
        metrics = await gateway.metrics()
        assert not any(name.startswith("ctxgate_compactions_total") for name in metrics)


async def test_what_the_checker_turns_down_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Invalid("changed")

    history = long_chat(30)
    async with serving(StrictEngine(4096)) as engine, gateway_of(tmp_path, engine) as gateway:
        with monkeypatch.context() as patched:
            patched.setattr(context_turn, "check_cut", refuse)
            assert (await send(gateway, history)).status == 400
            assert all(messages == history for messages, _ in engine.asked)
        engine.window = 50_000
        report(gateway, 50_000)
        assert (await send(gateway, history)).status == 200
        assert engine.asked[-1][0] == history
        assert (await gateway.metrics())['ctxgate_context_dropped_total{reason="invalid"}'] >= 1


async def test_a_replica_that_does_not_count_in_time_is_not_asked_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert context_lengths.COUNT_WITHIN_S <= 0.3
    monkeypatch.setattr(context_lengths, "COUNT_WITHIN_S", 0.02)
    body = wire.parse(json.dumps({"model": MODEL, "messages": [SYSTEM, TASK]}).encode())
    async with serving(StrictEngine(4096, counts=False)) as engine, gateway_of(tmp_path, engine) as gateway:
        fleet = gateway.services.fleet
        model = gateway.services.config.models[MODEL]
        pool = gateway.services.config.pools[model.pools[0]]
        counts = context_lengths.ExactCounts(gateway.services)
        assert [await counts.count(pool, model, body) for _ in range(3)] == [None] * 3
        assert engine.counted == 1
        engine.counts = True
        monkeypatch.setattr(context_lengths, "COUNT_WITHIN_S", 10.0)
        now_us = fleet.clock() + context_lengths.UNCOUNTED_US + 10_000_000
        monkeypatch.setattr(fleet, "clock", lambda: now_us)
        expected = tokens_of([SYSTEM, TASK])
        assert [await counts.count(pool, model, body) for _ in range(2)] == [expected] * 2
        assert engine.counted == 3


async def test_a_refusal_inside_a_stream_is_met_with_a_shorter_prompt(tmp_path: Path) -> None:
    async with (
        serving(StrictEngine(4096, in_stream=True)) as engine,
        gateway_of(tmp_path, engine, model={"window": 100_000}) as gateway,
    ):
        for expected in ([400, 200], [400, 200, 200]):  # the window is known from then on
            answer = await send(gateway, long_chat(30, seed=len(expected)), stream=True)
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in answer.body
            assert engine.statuses == expected
        rows = sorted(await gateway.rows(), key=lambda row: row.opened.opened_at_us)
        outcomes = [row.settled.outcome for row in rows]
        assert outcomes == [Outcome.REJECTED, Outcome.COMPLETED, Outcome.COMPLETED]
        assert rows[0].settled.usage.prompt == 0


async def test_one_that_cannot_be_shortened_is_told_before_the_stream_begins(
    tmp_path: Path,
) -> None:
    large = {"role": "system", "content": "Rule: " + "lorem ipsum dolor " * 2000}
    async with (
        serving(StrictEngine(4096, in_stream=True)) as engine,
        gateway_of(tmp_path, engine) as gateway,
    ):
        answer = await send(gateway, [large, TASK], stream=True)
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["code"] == "context_length_exceeded"
        engine.window, engine.breaks = 50_000, True
        report(gateway, 50_000)
        answer = await send(gateway, [large, TASK], stream=True)
        assert answer.status == 200
        assert b"upstream_truncated" in answer.body


async def test_the_head_of_a_stream_does_not_wait_for_an_engine_that_thinks_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "REFUSES_WITHIN_S", 0.0)
    async with serving(StrictEngine(50_000)) as engine, gateway_of(tmp_path, engine) as gateway:
        engine.speaks.clear()
        body = {"model": MODEL, "messages": long_chat(30), "max_tokens": 2, "stream": True}
        async with gateway.wire() as wire:
            wire.request(CHAT, body, (bearer(),))
            head = await wire.head()
            assert head.status == 200
            engine.speaks.set()
            answer = await wire.rest(head)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert [row.settled.outcome for row in await gateway.rows()] == [Outcome.COMPLETED]
