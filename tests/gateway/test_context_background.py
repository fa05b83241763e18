"""Compactions in the background of a conversation that goes on."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.window import Compact, Reason
from ctxgate.gateway import context_room
from ctxgate.gateway.config import Context
from ctxgate.gateway.summarizing import summarize
from support import twin
from support.gateway import MODEL, Gateway, config, until
from support.long_chats import SYSTEM, TASK, long_chat, requests_of
from support.recorder import recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ctxgate.gateway.services import Services
    from ctxgate.gateway.summarizing import Summarized
    from ctxgate.gateway.summary_work import SummaryWork
    from support.recorder import Recorder

pytestmark = pytest.mark.integration

CONTEXT = Context(compaction="window", tail_tokens=800, summary_tokens=300, recall=False)


async def test_context_o2_o3_one_pass_at_a_time_and_what_is_said_meanwhile_stays(tmp_path: Path) -> None:
    """A second request comes above the trigger while the first one's pass is still under way."""
    begun: list[SummaryWork] = []
    go_on = asyncio.Event()

    async def slow(services: Services, work: SummaryWork, _: str) -> Summarized | None:
        begun.append(work)
        await go_on.wait()
        return await summarize(services, work, "extractive")

    async with twin.serving(max_model_len=8192) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(tmp_path / "l.db", [recorder.url], served_name="tiny", context=CONTEXT)
        )
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            compactor = gateway.services.context.compactor
            compactor._summarize = slow
            histories = iter(requests_of(long_chat(60)))
            meanwhile = next(histories)
            over = 0  # requests that were answered while a pass was under way
            while over < 2:
                over += compactor.busy
                meanwhile = next(histories)
                answer = await gateway.post({"model": MODEL, "messages": meanwhile, "max_tokens": 2})
                assert answer.status == 200
                assert recorder.answered()[-1] == meanwhile
            go_on.set()
            await until(lambda: not compactor.busy)
            assert len(begun) == 1
            after = next(histories)
            await gateway.post({"model": MODEL, "messages": after, "max_tokens": 2})
            metrics = await gateway.metrics()
        finally:
            await gateway.stop()
    sent = recorder.answered()[-1]
    assert sent[:2] == [SYSTEM, TASK]
    assert sent[2]["content"].startswith("[Record")
    dropped = len(begun[0].dropped)
    assert sent[3:] == after[2 + dropped :], "all that the pass did not see or did not drop"
    assert "You must always keep file 4 unchanged." in json.dumps(sent)
    made = {name: value for name, value in metrics.items() if "ctxgate_compactions_total" in name}
    assert list(made.values()) == [1]


@asynccontextmanager
async def counted(
    folder: Path, written_by: Callable[..., Any], window: int = 8192
) -> AsyncIterator[tuple[Gateway, Recorder]]:
    """A gateway in front of a small engine, with its passes made by `written_by`."""
    async with twin.serving(max_model_len=window) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(folder / "l.db", [recorder.url], served_name="tiny", context=CONTEXT)
        )
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            gateway.services.context.compactor._summarize = written_by
            yield gateway, recorder
        finally:
            await gateway.stop()


async def test_context_f7_a_summary_is_used_although_each_request_ends_in_a_reminder_of_its_own(
    tmp_path: Path,
) -> None:
    """No request is a beginning of a later one; what was left out is the same in all of them."""
    made: list[SummaryWork] = []

    async def by_code(services: Services, work: SummaryWork, _: str) -> Summarized | None:
        made.append(work)
        return await summarize(services, work, "extractive")

    async with counted(tmp_path, by_code) as (gateway, recorder):
        compactor = gateway.services.context.compactor
        before: list[dict[str, Any]] = []
        breaks = 0
        for number, history in enumerate(requests_of(long_chat(50))):
            reminder = {"role": "user", "content": f"<env> turn {number} </env>"}
            answer = await gateway.post({"model": MODEL, "messages": [*history, reminder], "max_tokens": 2})
            assert answer.status == 200
            await until(lambda: not compactor.busy)
            sent = recorder.answered()[-1][:-1]
            breaks += sent[: len(before)] != before
            before = sent
        metrics = await gateway.metrics()
    assert made
    assert breaks == len(made), "each of the summaries went out, and nothing else changed a prompt"
    written = {name for name in metrics if "ctxgate_compactions_total" in name}
    assert all('by="extractive"' in name for name in written)
    assert before[2]["content"].startswith("[Record")


async def test_context_f7_passes_that_no_request_can_use_are_made_less_and_less(tmp_path: Path) -> None:
    """The first message changes in every request, so that none begins as the one before."""
    made: list[SummaryWork] = []

    async def by_code(services: Services, work: SummaryWork, _: str) -> Summarized | None:
        made.append(work)
        return await summarize(services, work, "extractive")

    async with counted(tmp_path, by_code) as (gateway, _):
        stage = gateway.services.context
        stage._decide = lambda state, _: Compact(Reason.WINDOW, state.tokens // 2, None)
        history = long_chat(20)
        for number in range(20):
            system = {"role": "system", "content": f"You are an agent. Nonce {number * 7919}."}
            await gateway.post({"model": MODEL, "messages": [system, *history[1:]], "max_tokens": 2})
            await until(lambda: not stage.compactor.busy)
        metrics = await gateway.metrics()
    # One, then none for 4 requests, one, none for 8, one; the last 5 of the 20 are within the next pause.
    assert len(made) == 3
    assert metrics['ctxgate_context_dropped_total{reason="unused"}'] == 17


async def test_context_f13_few_summaries_are_made_at_once_and_few_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_room, "WAITING", 6)
    at_once: list[int] = []
    going: set[int] = set()
    go_on = asyncio.Event()

    async def slow(services: Services, work: SummaryWork, _: str) -> Summarized | None:
        going.add(id(work))
        at_once.append(len(going))
        await go_on.wait()
        going.remove(id(work))
        return await summarize(services, work, "extractive")

    async with counted(tmp_path, slow) as (gateway, _):
        stage = gateway.services.context
        stage._decide = lambda state, _: Compact(Reason.WINDOW, state.tokens // 2, None)
        chats = [long_chat(12, seed=seed) for seed in range(10)]
        for number, chat in enumerate(chats):
            task = {"role": "user", "content": f"Task {number}."}
            await gateway.post({"model": MODEL, "messages": [chat[0], task, *chat[2:]], "max_tokens": 2})
        await until(lambda: len(at_once) == context_room.AT_ONCE)
        go_on.set()
        await until(lambda: not stage.compactor.busy)
        metrics = await gateway.metrics()
    assert (len(at_once), max(at_once)) == (6, context_room.AT_ONCE)
    assert metrics['ctxgate_context_dropped_total{reason="busy"}'] == 4
