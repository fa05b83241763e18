"""The recall process from outside: begun when needed, begun again when it dies, ended with the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.recall_process import RecallProcess, command
from ctxgate.gateway.recall_wire import Add, Forget, Told
from support.recalling import ORIGINALS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.integration

A, B, C = ORIGINALS
SOON = 60.0
FILLED = Add(b"one", list(ORIGINALS.items()), begins=True)
SILENT = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
async def process() -> AsyncIterator[RecallProcess]:
    process = RecallProcess(command(None), retry_delays_s=(0.0,))
    yield process
    await process.close()


async def ids(process: RecallProcess, text: str) -> list[str]:
    answer = await process.ask(b"one", text, 1, SOON)
    assert isinstance(answer, Told)
    return [hit.id for hit in answer.hits]


async def answered(process: RecallProcess) -> None:
    """Wait until the process has begun and answers."""
    assert await process.ask(b"none", "", 1, SOON) == Told(0, False, False, [])


async def test_nothing_runs_before_it_is_needed_and_nothing_after_the_end(process: RecallProcess) -> None:
    assert (process.starts, process.pid) == (0, None)
    await answered(process)
    pid = process.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    await process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    process.send(FILLED)
    assert await process.ask(b"one", "d56a046e", 1, SOON) is None
    assert process.starts == 1


async def test_what_is_sent_is_found(process: RecallProcess) -> None:
    await answered(process)
    process.send(FILLED)
    while not await indexed(process):
        pass
    assert await ids(process, "d56a046e") == [C]
    assert await ids(process, "main.py") == [B]
    process.send(Forget(b"one"))
    while await indexed(process):
        pass


async def indexed(process: RecallProcess) -> bool:
    answer = await process.ask(b"one", "d56a046e", 1, SOON)
    return answer is not None and [hit.id for hit in answer.hits] == [C]


async def test_a_process_that_dies_is_begun_again_and_knows_nothing(process: RecallProcess) -> None:
    process.send(FILLED)
    while not await indexed(process):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    while (answer := await process.ask(b"one", "d56a046e", 1, SOON)) is None:
        pass  # asked as it died
    assert not answer.known
    assert process.starts == 2


async def test_many_questions_at_once_each_get_their_own_answer(process: RecallProcess) -> None:
    process.send(FILLED)
    while not await indexed(process):
        pass
    words = ["d56a046e", "main.py", "billing"] * 20
    answers = await asyncio.gather(*(ids(process, word) for word in words))
    assert answers == [[C], [B], [A]] * 20


async def test_a_process_that_says_nothing_is_not_waited_for() -> None:
    process = RecallProcess(SILENT)
    assert await process.ask(b"one", "anything", 1, 0.01) is None
    await process.close()


async def test_who_sends_too_much_waits_until_it_is_taken() -> None:
    process = RecallProcess(command(None), queue_bytes=1_000)
    big = Add(b"one", [(A, b"x" * 200_000)], begins=True)
    for _ in range(5):
        await process.room()
        process.send(big)
    await process.room()
    await answered(process)
    await process.close()


async def test_a_program_that_is_not_there_costs_nothing_but_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = RecallProcess(("/nonexistent/python",))
    assert await process.ask(b"one", "anything", 1, SOON) is None
    assert "cannot be started" in caplog.text
    await process.close()


async def test_the_gateways_death_ends_it() -> None:
    reading, writing = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *command(None), stdin=reading, stdout=asyncio.subprocess.DEVNULL
    )
    os.close(reading)
    os.close(writing)
    async with asyncio.timeout(SOON):
        assert await child.wait() == 0


async def test_it_loads_nothing_heavy_without_a_model() -> None:
    code = (
        "import sys, ctxgate.gateway.recall_worker\n"
        "print(*sorted({'torch', 'faiss', 'numpy', 'asyncio', 'sqlite3', 'aiohttp'} & set(sys.modules)))"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert out.decode().split() == []
