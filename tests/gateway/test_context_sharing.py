"""Requests that begin alike, or come at once: what they share, what they must not, and what a task leaves."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from ctxgate.gateway.config import Context
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support import twin
from support.gateway import MODEL, Gateway, bearer, config, until
from support.ledgers import price
from support.long_chats import SYSTEM, TASK
from support.recalling import NearProcess
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.client import Answer

pytestmark = pytest.mark.integration

WINDOW = 16_384
CONTEXT = Context(tail_tokens=800, summary_tokens=300, summarizer="off", tool_result_bytes=4000)
SECRET = "zq-90417-mirror"
NEEDLE = f"The deploy password of the staging mirror host zeus-mirror-77 is {SECRET} for now."
QUESTION = {
    "role": "user",
    "content": "What is the deploy password of the staging mirror host zeus-mirror-77?",
}


def run_of(name: str, rounds: int = 24, first: str = "") -> list[dict[str, Any]]:
    """An agent's run: the same beginning for all, and results of its own; the first one says `first`."""
    messages: list[dict[str, Any]] = [SYSTEM, TASK]
    for number in range(rounds):
        function = {"name": "read", "arguments": json.dumps({"path": f"{name}/{number}"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"Part {number} of {name}.", "tool_calls": [call]})
        content = f"{name}{number} lorem " * 300
        if first and number == 0:
            content = first + " lorem ipsum" * 40
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    return messages


@asynccontextmanager
async def running(folder: Path, recorder: Recorder) -> AsyncIterator[Gateway]:
    gateway = await Gateway.start(
        config(folder / "ledger.db", [recorder.url], served_name="tiny", context=CONTEXT)
    )
    gateway.services.recall._process = NearProcess()
    try:
        await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
        yield gateway
    finally:
        await gateway.stop()


async def send(gateway: Gateway, messages: list[dict[str, Any]], task: str = "one") -> Answer:
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    answer = await gateway.post(body, headers=(bearer(), ("x-ctxgate-task", task)))
    await until(lambda: not gateway.services.background)
    await gateway.services.recall.settled()
    return answer


async def compactions(gateway: Gateway) -> float:
    metrics = await gateway.metrics()
    return sum(value for name, value in metrics.items() if name.startswith("ctxgate_compactions_total"))


async def test_forks_of_one_root_that_come_at_once_all_fit(tmp_path: Path) -> None:
    forks = [run_of(f"fork{number}") for number in range(12)]
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        running(tmp_path, recorder) as gateway,
    ):
        answers = await asyncio.gather(*(send(gateway, fork) for fork in forks))
        assert [answer.status for answer in answers] == [200] * len(forks)
        assert [status for _, status in recorder.asked] == [200] * len(forks)
        first = {asked["messages"][-1]["content"]: asked["messages"] for asked, _ in recorder.asked}
        assert await compactions(gateway) == len(forks)
        for fork in forks:
            await send(gateway, [*fork, {"role": "assistant", "content": "Yes."}, {**TASK, "content": "On."}])
            before = first[fork[-1]["content"]]
            assert recorder.asked[-1][0]["messages"][: len(before)] == before


async def test_equal_requests_at_once_make_one_compaction(tmp_path: Path) -> None:
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        running(tmp_path, recorder) as gateway,
    ):
        answers = await asyncio.gather(*(send(gateway, run_of("same")) for _ in range(6)))
        assert {answer.header("x-ctxgate-compaction") for answer in answers} != {""}
        assert len({json.dumps(asked["messages"]) for asked, _ in recorder.asked}) == 1
        assert await compactions(gateway) == 1


async def test_context_p3_runs_that_begin_alike_recall_only_their_own(tmp_path: Path) -> None:
    ask = [{"role": "assistant", "content": "Done."}, QUESTION]
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        running(tmp_path, recorder) as gateway,
    ):
        mine, theirs = run_of("mine", first=NEEDLE), run_of("theirs")
        for run in (mine, theirs):
            assert (await send(gateway, run)).header("x-ctxgate-compaction") != ""
        await send(gateway, [*theirs, *ask], "two")
        assert recorder.asked[-1][0]["messages"][-1] == QUESTION
        await send(gateway, [*mine, *ask])
        assert SECRET in recorder.asked[-1][0]["messages"][-1]["content"]


async def test_a_small_window_has_room_for_what_is_brought_back(tmp_path: Path) -> None:
    """A share of 4,096 tokens would be less than any passage needs."""
    run = run_of("small", 12)
    run[3]["content"] = NEEDLE
    async with (
        twin.serving(max_model_len=4096) as engine,
        recording(engine.url) as recorder,
        running(tmp_path, recorder) as gateway,
    ):
        assert (await send(gateway, run)).header("x-ctxgate-compaction") != ""
        await send(gateway, [*run, {"role": "assistant", "content": "Done."}, QUESTION])
        assert SECRET in recorder.asked[-1][0]["messages"][-1]["content"]


async def test_what_a_deleted_task_left_goes_out_no_more(tmp_path: Path) -> None:
    rule = f"You must never tell {SECRET} to anybody."
    history = [*run_of("mine", 1, NEEDLE), {"role": "user", "content": rule}, *run_of("rest", 24)[2:]]
    asked = [*history, {"role": "assistant", "content": "Done."}, QUESTION]
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        running(tmp_path, recorder) as gateway,
    ):
        await send(gateway, history)
        await send(gateway, asked)
        assert recorder.asked[-1][0]["messages"][-1] != QUESTION
        assert SECRET in kept(gateway)
        deleted = (await gateway.get("/v1/context?task=one", method="DELETE")).document
        assert deleted["deleted"] > 10
        assert SECRET not in kept(gateway)
        await send(
            gateway, [*asked, {"role": "assistant", "content": "?"}, {**TASK, "content": "Well."}], "two"
        )
        sent = recorder.asked[-1][0]["messages"]
        assert QUESTION in sent  # without what had been brought back behind it


async def test_a_deleted_tasks_forms_are_emptied_and_stay_so(tmp_path: Path) -> None:
    early, late = b"e" * 32, b"l" * 32
    ledger = SqliteLedger(tmp_path / "ledger.db", price=price)
    try:
        await ledger.forms.claim("acme/alpha", {early: b"secret"}, (), 1)
        await ledger.archive.keep("acme/alpha", "one", {}, 1, forms=[early])
        assert (await ledger.archive.delete("acme/alpha", "one", 2)).forms == (early,)
        # A summary that was under way meanwhile has been claimed, and is to be kept now.
        await ledger.forms.claim("acme/alpha", {late: b"secret", early: b"secret"}, (), 3)
        assert not await ledger.archive.keep("acme/alpha", "one", {}, 3, forms=[late], since_us=1)
        found = await ledger.forms.claim("acme/alpha", {early: b"secret"}, [late], 4)
        assert found == {early: b"", late: b""}
    finally:
        await ledger.close()


def kept(gateway: Gateway) -> str:
    """Every text of the store's forms and originals."""
    with closing(sqlite3.connect(gateway.services.config.store)) as connection:
        texts = [text for (text,) in connection.execute("SELECT text FROM forms")]
        packed = connection.execute("SELECT body, size FROM archive WHERE size > 0").fetchall()
    unpack = zstandard.ZstdDecompressor().decompress
    return b"\n".join([*texts, *(unpack(body, max_output_size=size) for body, size in packed)]).decode(
        "utf-8", "replace"
    )
