"""The SQLite ledger: group commit and a failing disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import InvalidRow, LedgerUnavailable
from ctxgate.gateway.stores.checkpoint import EVERY, Checkpointer
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.gateway.stores.watch import FileWatch
from ctxgate.gateway.stores.writer import GATHER_FROM
from support.ledgers import opened, price, settled
from support.sqlite_ledger import Locked, failed_again, hold

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
async def ledger(path: Path) -> AsyncIterator[SqliteLedger]:
    """A ledger that gives up on a locked database at once and tries again soon."""
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0, retry_delays_s=(0.001,))
    yield ledger
    await ledger.close()


# Group commit


async def test_what_queues_up_behind_a_commit_shares_the_next_one(ledger: SqliteLedger) -> None:
    statements: list[str] = []
    release = hold(ledger)
    ledger._writer.call(lambda connection: connection.set_trace_callback(statements.append))
    futures = [
        step for i in range(500) for step in (ledger.open(opened(f"a{i}")), ledger.settle(settled(f"a{i}")))
    ]
    assert ledger.pending == 1_000
    ledger._writer.flush()  # now everything is handed to the writer
    release()
    await asyncio.gather(*futures)
    assert ledger.pending == 0
    assert len((await ledger.rows(limit=1_000)).attempts) == 500
    # 500 rows: three statements of 128, then 64, 32, 16 and 4.
    assert sum(statement.startswith("INSERT") for statement in statements) == 7
    assert statements.count("COMMIT") == 2  # the call's own and one for all


async def test_a_batch_wakes_the_event_loop_once(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    real, wakes = loop.call_soon_threadsafe, []

    def counting(*arguments: object, **options: object) -> asyncio.Handle:
        wakes.append(arguments)
        return real(*arguments, **options)  # type: ignore[arg-type]  # handed on as they came

    release = hold(ledger)
    futures = [ledger.open(opened(f"a{i}")) for i in range(300)]
    ledger._writer.flush()  # now everything is handed to the writer
    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    release()
    await asyncio.gather(*futures)
    assert len(wakes) == 1


async def test_neither_step_waits_for_the_disk(ledger: SqliteLedger) -> None:
    release = hold(ledger)
    opening, settlement = ledger.open(opened()), ledger.settle(settled())
    await asyncio.sleep(0)
    assert not opening.done()
    assert not settlement.done()
    release()
    assert await settlement is True


async def test_bad_contents_fail_alone(ledger: SqliteLedger, caplog: pytest.LogCaptureFixture) -> None:
    """Neighbours in the same transaction are written."""
    release = hold(ledger)
    good, bad, last = (
        ledger.open(opened("a1")),
        ledger.open(opened("a2", body_bytes=2**63)),
        ledger.settle(settled("a1")),
    )
    release()
    assert await last is True
    await good
    with pytest.raises(InvalidRow, match=r"a2: OverflowError"):
        await bad
    assert "InvalidRow: attempt a2" in caplog.text
    assert ledger.failures == 0


# A store that fails


async def test_api_b1_an_opening_is_refused_while_the_database_is_locked(
    ledger: SqliteLedger, path: Path
) -> None:
    with Locked(path), pytest.raises(LedgerUnavailable, match="locked"):
        await ledger.open(opened())
    await ledger.open(opened())
    assert await ledger.settle(settled()) is True


async def test_the_writer_waits_for_another_process_to_finish(path: Path) -> None:
    ledger = SqliteLedger(path, price=price, busy_timeout_s=60)
    asked = threading.Event()

    def trace(connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(lambda statement: asked.set() if "BEGIN" in statement else None)

    ledger._writer.call(trace).result()
    with Locked(path):
        opening = ledger.open(opened())
        await asyncio.to_thread(asked.wait)
    await opening
    await ledger.close()
    assert ledger.failures == 0


@pytest.mark.parametrize(("operations", "moved"), [((9,), False), ((9, 1), True), ((25,), True)])
def test_the_log_moves_into_the_database_after_so_many_operations(
    path: Path, operations: tuple[int, ...], moved: bool
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        before = path.stat().st_size
        checkpointer = Checkpointer(path, watch=FileWatch(path), every=10)
        for number in operations:
            checkpointer.count(number)
        checkpointer.stop()
        assert (path.stat().st_size > before) is moved


async def test_the_writer_tells_the_checkpointer_what_it_commits(path: Path) -> None:
    ledger = SqliteLedger(path, price=price)
    await asyncio.gather(*(ledger.open(opened(f"a{i}")) for i in range(EVERY)))
    ledger._writer.call(lambda _: None).result()  # after what the batch does last
    assert ledger._checkpointer._since_last == 0
    await ledger.open(opened("one more"))
    ledger._writer.call(lambda _: None).result()
    assert ledger._checkpointer._since_last == 1
    await ledger.close()


async def test_api_b2_a_settlement_is_tried_again_until_the_store_takes_it(
    ledger: SqliteLedger, path: Path
) -> None:
    await ledger.open(opened())
    with Locked(path):
        settlement = ledger.settle(settled())
        await failed_again(ledger)
        await failed_again(ledger)
        assert not settlement.done()
        assert ledger.pending == 1
    assert await settlement is True
    assert ledger.pending == 0
    assert ledger.failures >= 2
    [row] = await ledger.report("task")
    assert (row.attempts, row.cost_nano) == (1, 42)


async def test_api_b27_the_settlement_of_a_refused_opening_writes_both(
    ledger: SqliteLedger, path: Path
) -> None:
    with Locked(path):
        opening = ledger.open(opened())
        with pytest.raises(LedgerUnavailable):
            await opening
        settlement = ledger.settle(settled())
        await failed_again(ledger)
    assert await settlement is True
    [attempt] = (await ledger.rows()).attempts
    assert (attempt.opened, attempt.settled) == (opened(), settled())


async def test_an_opening_behind_kept_settlements_is_refused_too(ledger: SqliteLedger, path: Path) -> None:
    """Kept settlements that fill a whole batch must not hide later openings from the failure."""
    ids = [f"a{i}" for i in range(1_500)]
    await asyncio.gather(*(ledger.open(opened(name)) for name in ids))
    with Locked(path):
        settlements = [ledger.settle(settled(name)) for name in ids]
        with pytest.raises(LedgerUnavailable):
            await ledger.open(opened("late"))
        with pytest.raises(LedgerUnavailable):
            await ledger.recover()
    assert await asyncio.gather(*settlements) == [True] * 1_500


async def test_api_b2_a_full_disk_refuses_openings_and_keeps_settlements(ledger: SqliteLedger) -> None:
    await ledger.open(opened())

    # The limit is the connection's, and SQLite serializes its use.
    connection = ledger._writer._transactions._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    refused = 0
    for number in range(200):
        [result] = await asyncio.gather(
            ledger.open(opened(f"b{number}", task="t" * 2_000)), return_exceptions=True
        )
        refused += isinstance(result, LedgerUnavailable) and "full" in str(result)
    assert refused > 100
    settlement = ledger.settle(settled("b199"))  # needs the row that was refused
    await failed_again(ledger)
    assert not settlement.done()
    connection.execute("PRAGMA max_page_count = 1000000")
    assert await settlement is True
    assert await ledger.settle(settled()) is True


async def test_an_idle_writer_is_woken_at_once_while_few_attempts_are_open(ledger: SqliteLedger) -> None:
    staged = ledger._writer._staged
    first = ledger.open(opened("a0"))
    assert staged == []
    await first
    futures = [ledger.open(opened(f"a{number}")) for number in range(1, GATHER_FROM)]
    await asyncio.gather(*futures)
    gathered = ledger.open(opened("one too many"))
    assert len(staged) == 1  # an idle writer, but a busy gateway: it waits for what else comes
    await gathered
