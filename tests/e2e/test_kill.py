"""The gateway as a process that is killed or asked to end while streams are open."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import measured
from support.client import Wire
from support.gateway import HELLO, STREAM, bearer, until
from support.serving import configuration, rows_of, serving
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from pathlib import Path

    from support.upstream import Exchange, Upstream

pytestmark = pytest.mark.e2e
STREAMS = 100
DONE = b"data: [DONE]\n\n"


async def opened(port: int, number: int) -> Wire:
    """A stream that has been asked for."""
    wire = await Wire.connect(port)
    wire.request(body=STREAM, headers=[bearer(), ("x-ctxgate-task", f"task-{number}")])
    return wire


def begin(exchange: Exchange) -> None:
    """The first part of a stream."""
    exchange.head()
    exchange.text("x")


def finish(exchange: Exchange) -> None:
    """The rest of it."""
    exchange.chunk({}, "stop")
    exchange.usage_chunk()
    exchange.done()


async def read_to_the_end(wire: Wire) -> bool:
    """Read what comes; whether the stream's end marker was among it."""
    received = b""
    try:
        while chunk := await wire.chunk():
            received += chunk
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return DONE in received
    return DONE in received


async def test_kill_9_during_100_streams_loses_no_settled_row_and_repeats_none(
    upstream: Upstream, tmp_path: Path
) -> None:
    file = configuration(tmp_path, upstream.url)
    upstream.default = by_hand
    async with serving(file) as served:
        wires = {number: await opened(served.port, number) for number in range(STREAMS)}
        exchanges = [await upstream.next_call() for _ in range(STREAMS)]
        for exchange in exchanges:
            begin(exchange)
        for wire in wires.values():
            await wire.head()
        # Two thirds of the streams end, and the process is killed somewhere among them.
        readers = {number: asyncio.create_task(read_to_the_end(wire)) for number, wire in wires.items()}
        for count, exchange in enumerate(exchanges[: STREAMS * 2 // 3]):
            finish(exchange)
            if count == STREAMS // 3:
                await until(lambda: sum(reader.done() for reader in readers.values()) >= STREAMS // 4)
        served.process.send_signal(signal.SIGKILL)
        assert await served.ended() == -signal.SIGKILL
        seen = {f"task-{number}" for number, reader in readers.items() if await reader}
        for wire in wires.values():
            await wire.close()
    assert len(seen) >= STREAMS // 4
    upstream.default = ok
    async with serving(file) as served:  # the restart settles what the dead process left open
        wire = await Wire.connect(served.port)
        wire.request(body=HELLO, headers=[bearer(), ("x-ctxgate-task", "after")])
        assert (await wire.answer()).status == 200
        await wire.close()
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
    rows = [row for row in await rows_of(file) if row.opened.task != "after"]
    assert len({row.opened.attempt_id for row in rows}) == len(rows)
    assert sorted(row.opened.task for row in rows) == sorted(f"task-{number}" for number in range(STREAMS))
    by_task = {row.opened.task: row.settled for row in rows}
    for task in seen:
        assert by_task[task].outcome is Outcome.COMPLETED
        assert by_task[task].usage.output == measured(3)
        assert by_task[task].charge.total == 17_200
    others = {by_task[task].outcome for task in by_task.keys() - seen}
    assert others <= {Outcome.CRASHED, Outcome.COMPLETED}
    assert sum(settled.outcome is Outcome.CRASHED for settled in by_task.values()) >= STREAMS // 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_open_streams_finish_and_books_them(
    upstream: Upstream, tmp_path: Path, number: signal.Signals
) -> None:
    file = configuration(tmp_path, upstream.url)
    upstream.default = by_hand
    async with serving(file) as served:
        wires = [await opened(served.port, index) for index in range(10)]
        exchanges = [await upstream.next_call() for _ in wires]
        for exchange in exchanges:
            begin(exchange)
        for wire in wires:
            await wire.head()
        served.process.send_signal(number)
        # Told to end, it takes no new connection; that is how this test knows that it was told.
        await until_refused(served.port)
        for exchange in exchanges:
            finish(exchange)
        assert all([await read_to_the_end(wire) for wire in wires])
        assert await served.ended() == 0
        for wire in wires:
            await wire.close()
    rows = await rows_of(file)
    assert [row.settled.outcome for row in rows] == [Outcome.COMPLETED] * len(wires)
    assert [row.settled.charge.total for row in rows] == [17_200] * len(wires)


async def until_refused(port: int) -> None:
    """Wait until nothing listens on a port."""
    while True:
        try:
            wire = await Wire.connect(port)
        except ConnectionError:
            return
        await wire.close()
        await asyncio.sleep(0.01)


async def test_a_port_that_is_taken_and_a_broken_file_are_exit_code_2(
    upstream: Upstream, tmp_path: Path
) -> None:
    from ctxgate.gateway.cli import main

    file = configuration(tmp_path, upstream.url)
    assert main(["serve", "-c", str(file), "--port", str(upstream.port)]) == 2
    file.write_text("pools: {}")
    assert main(["serve", "-c", str(file)]) == 2
