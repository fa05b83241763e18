"""Several gateway processes on one ledger file, and their deaths. Real processes, real SIGKILL."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

SCRIPT: Final = Path(__file__).with_name("ledger_process.py")


class Gateways:
    """Starts ledger processes and ends those that are left."""

    def __init__(self, database: Path) -> None:
        self.database = database
        self._running: list[subprocess.Popen[str]] = []

    def start(self, name: str, *, attempts: int, concurrency: int = 64) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), str(self.database), name, str(attempts), str(concurrency)]
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._running.append(process)
        return process

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    gateways = Gateways(tmp_path / "ledger.db")
    yield gateways
    gateways.end()


def kill_after(process: subprocess.Popen[str], lines: int) -> Counter[tuple[str, str]]:
    """Read that many lines, SIGKILL, read the rest; counts each (verb, attempt id) that was told."""
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    told += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    complete = [line.split() for line in told if line.endswith("\n") and line != "ready\n"]
    return Counter((verb, attempt_id) for verb, attempt_id in complete)


def stored(database: Path) -> dict[str, str | None]:
    """Outcome by attempt id; fails where an id has two rows."""
    connection = sqlite3.connect(database)
    rows = connection.execute("SELECT attempt_id, outcome FROM attempts").fetchall()
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    assert len({attempt_id for attempt_id, _ in rows}) == len(rows)
    return dict(rows)


@pytest.mark.parametrize("lines", [2, 37, 700, 4_321])
async def test_api_b22_kill_9_loses_nothing_that_was_told_and_recovery_settles_the_rest(
    gateways: Gateways, lines: int
) -> None:
    told = kill_after(gateways.start("a", attempts=100_000), lines)
    assert max(told.values()) == 1
    told_opened = {attempt_id for verb, attempt_id in told if verb == "opened"}
    told_settled = {attempt_id for verb, attempt_id in told if verb == "settled"}
    before = stored(gateways.database)
    open_before = {attempt_id for attempt_id, outcome in before.items() if outcome is None}
    assert told_opened <= before.keys()
    assert told_settled <= before.keys() - open_before

    ledger = SqliteLedger(gateways.database, price=price)
    recovered = await ledger.recover()
    assert sorted(recovered) == sorted(open_before)
    after = stored(gateways.database)
    assert after == {attempt_id: before[attempt_id] or "crashed" for attempt_id in before}
    assert await ledger.recover() == []
    assert stored(gateways.database) == after
    [row] = await ledger.report("team")
    await ledger.close()
    completed = len(before) - len(open_before)
    assert row.attempts == len(before)
    assert row.cost_nano == 42 * completed + 28 * len(open_before)


async def test_recovery_while_another_process_works_takes_only_the_dead_ones_attempts(
    gateways: Gateways,
) -> None:
    living = gateways.start("living", attempts=2_000, concurrency=8)
    dead = gateways.start("dead", attempts=100_000, concurrency=8)
    assert living.stdout is not None
    assert living.stdout.readline() == "ready\n"
    kill_after(dead, 200)
    open_dead = {
        name for name, outcome in stored(gateways.database).items() if name.startswith("dead") and not outcome
    }
    ledger = SqliteLedger(gateways.database, price=price)
    assert sorted(await ledger.recover()) == sorted(open_dead)
    living.stdout.read()
    assert living.wait() == 0
    outcomes = stored(gateways.database)
    stayed_open = {name for name, outcome in outcomes.items() if outcome is None}
    assert stayed_open == {f"living-{number}" for number in range(9, 2_000, 10)}
    assert sorted(await ledger.recover()) == sorted(stayed_open)
    await ledger.close()


async def test_two_processes_write_one_file_without_losing_a_row(gateways: Gateways) -> None:
    processes = [gateways.start(name, attempts=1_500, concurrency=16) for name in ("a", "b")]
    ledger = SqliteLedger(gateways.database, price=price)  # a third one, in this process
    await ledger.open(opened("c-0"))
    assert await ledger.settle(settled("c-0")) is True
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.read().count("settled") == 1_350
        assert process.wait() == 0
    [row] = await ledger.report("team")
    await ledger.close()
    assert (row.requests, row.attempts, row.cost_nano) == (2_701, 2_701, 42 * 2_701)
    assert len(stored(gateways.database)) == 3_001
