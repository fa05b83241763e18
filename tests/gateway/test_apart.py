"""Work in another process: its result, its failures, its end."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from ctxgate.compression.summary_record import RecordText, RecordWork, record_of
from ctxgate.gateway import apart
from ctxgate.gateway.apart import Apart, ApartFailed
from support.gateway import until
from support.summaries import conversation

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = pytest.mark.integration

MADE = "ctxgate.compression.summary_record:made"


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def test_a_long_history_is_no_work_of_this_process() -> None:
    """What would hold the interpreter's lock for long costs this process a fraction of what it takes."""
    messages = [msgspec.json.encode(each) for each in conversation(400, lines=40)[2:]]
    work = RecordWork(messages, [], None, 4000, sum(map(len, messages)))
    packed = msgspec.msgpack.encode(work)
    own, theirs = time.process_time(), children_s()
    out = await Apart().run(MADE, packed)
    own, theirs = time.process_time() - own, children_s() - theirs
    assert msgspec.msgpack.decode(out, type=RecordText) == record_of(work)
    assert own < theirs / 4


async def test_what_fails_is_told_by_its_code_alone() -> None:
    with pytest.raises(ApartFailed, match=r"^its process ended with code 1$"):
        await Apart().run("no.such:thing", b"work")
    with pytest.raises(ApartFailed, match=r"^its process ended with code 1$"):
        await Apart().run(MADE, b"this is no packed work")


async def test_a_process_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_COMMAND", ("/no/such/program",))
    with pytest.raises(ApartFailed, match="FileNotFoundError"):
        await Apart().run(MADE, b"work")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that were started; each of them sleeps instead of working."""
    processes: list[subprocess.Popen[bytes]] = []
    start: Callable[[str], subprocess.Popen[bytes]] = apart._started

    def noted(function: str) -> subprocess.Popen[bytes]:
        processes.append(start(function))
        return processes[-1]

    monkeypatch.setattr(apart, "_COMMAND", ("sleep",))
    monkeypatch.setattr(apart, "_started", noted)
    return processes


async def test_one_that_takes_too_long_is_ended(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ApartFailed, match="too long"):
        await Apart(within_s=0.0).run("600", b"work")
    assert await asyncio.to_thread(started[0].wait, 10) == -9


async def test_a_cancelled_one_is_ended_and_the_next_has_its_turn(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = Apart()
    first = asyncio.create_task(at_work.run("600", b"work"))
    second = asyncio.create_task(at_work.run("0", b"work"))
    await until(lambda: started)
    assert len(started) == 1, "one at a time"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == b""
    assert await asyncio.to_thread(started[0].wait, 10) == -9
