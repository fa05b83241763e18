"""The SQLite ledger in an outage: its health, the spill file meanwhile, a file that is gone."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import LedgerUnavailable, SchemaMismatch
from ctxgate.gateway.stores import spill, sqlite, writer
from ctxgate.gateway.stores.schema import VERSION
from ctxgate.gateway.stores.spill import Spilled, SpillFailed
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.gateway.stores.transactions import touch
from ctxgate.gateway.stores.watch import FileWatch
from support.gateway import until
from support.ledgers import opened, price, settled
from support.sqlite_ledger import Locked, failed_again

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
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


def attempts_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute(
            "SELECT count(*) FROM attempts WHERE settled_at_us IS NOT NULL"
        ).fetchone()[0]
        return found


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute("PRAGMA user_version").fetchone()[0]
        return found


def failing_after(lines: int) -> Callable[[int, bytes], int]:
    """An `os.write` for a disk that fills up in the middle of a line."""
    real, calls = os.write, Counter[str]()

    def write(file: int, data: bytes) -> int:
        calls["write"] += 1
        if calls["write"] <= lines:
            return real(file, data)
        if calls["write"] == lines + 1:
            return real(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    return write


# Health


async def test_a_ledger_is_healthy_again_by_itself_with_nothing_to_write(
    ledger: SqliteLedger, path: Path
) -> None:
    """Nobody sends rows to a ledger that is not: it must find out alone that its store works."""
    assert (ledger.healthy, ledger.problem) == (True, None)
    with Locked(path):
        with pytest.raises(LedgerUnavailable):
            await ledger.open(opened())
        assert (ledger.healthy, ledger.problem) == (False, "the ledger refuses writes")
        await failed_again(ledger)
        assert not ledger.healthy
        assert ledger.pending == 0
    await until(lambda: ledger.healthy)


async def test_the_probe_of_a_store_writes_for_real_and_changes_nothing(
    ledger: SqliteLedger, path: Path
) -> None:
    """A transaction without a write succeeds on a full disk too."""
    await ledger.open(opened())
    log = path.with_name("ledger.db-wal")
    before = [log.stat().st_size, attempts_in(path), version_of(path)]
    await asyncio.to_thread(ledger._writer.call(touch).result)
    after = [log.stat().st_size, attempts_in(path), version_of(path)]
    assert after[0] > before[0]
    assert after[1:] == before[1:] == [0, VERSION]


# A long outage


async def test_what_memory_should_not_hold_waits_in_the_spill_file_and_is_written_afterwards(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MAX_KEPT", 100)
    ledger._writer._spill_at = 100
    names = [f"a{number}" for number in range(1_200)]
    await asyncio.gather(*(ledger.open(opened(name)) for name in names[:600]))
    with Locked(path):
        refused = await asyncio.gather(
            *(ledger.open(opened(name)) for name in names[600:]), return_exceptions=True
        )
        assert {type(each) for each in refused} == {LedgerUnavailable}
        settlements = [ledger.settle(settled(name)) for name in names]
        assert await asyncio.gather(*settlements) == [True] * 1_200
        assert ledger.pending == 0
        assert ledger._writer._refused == {}
        assert attempts_in(path) == 0
        [file] = path.with_name("ledger.db.spill").iterdir()
        assert len(file.read_text().splitlines()) == 1_200
    await until(lambda: not file.exists())
    [row] = await ledger.report("task")
    assert (row.attempts, row.cost_nano) == (1_200, 1_200 * 42)
    assert ledger.healthy
    assert [record.levelname for record in caplog.records if str(file) in record.getMessage()] == ["WARNING"]


async def test_an_outage_that_does_not_end_leaves_the_rest_to_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_KEPT", 10)
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0, retry_delays_s=(0.001,))
    names = [f"a{number}" for number in range(13)]
    await asyncio.gather(*(ledger.open(opened(name)) for name in names))
    with Locked(path):
        await asyncio.gather(*(ledger.settle(settled(name)) for name in names[:10]))
        late = [ledger.settle(settled(name)) for name in names[10:]]
        await failed_again(ledger)
        await ledger.close()
        assert {type(each.exception()) for each in late} == {LedgerUnavailable}
    ledger = SqliteLedger(path, price=price)
    assert await ledger.recover() == []
    [row] = await ledger.report("task")
    await ledger.close()
    assert (row.attempts, row.cost_nano) == (13, 13 * 42)


async def test_settlements_wait_in_memory_where_the_spill_file_takes_none(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MAX_KEPT", 10)
    ledger._writer._spill_at = 10
    folder = path.with_name("ledger.db.spill")
    folder.write_text("not a folder")
    names = [f"a{number}" for number in range(15)]
    await asyncio.gather(*(ledger.open(opened(name)) for name in names))
    with Locked(path):
        settlements = [ledger.settle(settled(name)) for name in names]
        await failed_again(ledger)
        await failed_again(ledger)
        assert ledger.pending == 15
    assert await asyncio.gather(*settlements) == [True] * 15
    assert sum("takes no settlements" in record.getMessage() for record in caplog.records) == 1


def test_a_spill_file_on_a_full_disk_keeps_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spill" / "one"
    rows = [Spilled(settled(f"a{number}"), opened(f"a{number}")) for number in range(5)]
    monkeypatch.setattr(os, "write", failing_after(3))
    with pytest.raises(SpillFailed, match="No space left") as failure:
        spill.write(file, rows)
    monkeypatch.undo()
    assert failure.value.kept == 3
    spill.write(file, rows[3:])
    assert list(spill.chunks(file, 2)) == [rows[:2], rows[2:4], rows[4:]]


async def test_closing_counts_what_is_really_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0)
    names = [f"a{number}" for number in range(5)]
    await asyncio.gather(*(ledger.open(opened(name)) for name in names))
    monkeypatch.setattr(os, "write", failing_after(3))
    with Locked(path):
        settlements = [ledger.settle(settled(name)) for name in names]
        with pytest.raises(LedgerUnavailable, match="lost"):
            await ledger.close()
    await asyncio.gather(*settlements, return_exceptions=True)
    assert "2 settlements are lost" in caplog.text
    assert "3 settlements wait in the spill file" in caplog.text


# A file that is gone


def test_a_file_that_is_replaced_is_lost_until_it_is_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("one")
    watch = FileWatch(path)
    seen = []

    def look() -> None:
        watch.check()
        seen.append(watch.lost)

    look()
    kept = path.rename(path.with_name("kept"))
    look()
    look()
    path.write_text("another")
    look()
    kept.replace(path)
    look()
    assert seen == [False, True, True, True, False]
    assert [record.levelname for record in caplog.records] == ["CRITICAL", "WARNING"]


async def test_a_ledger_whose_file_is_gone_takes_no_writes_until_it_is_back(
    ledger: SqliteLedger, path: Path
) -> None:
    await ledger.open(opened())
    kept = path.rename(path.with_name("kept"))  # noqa: ASYNC240  # a local file
    ledger._file.check()
    assert (ledger.healthy, ledger.problem) == (False, "the ledger's file was deleted or replaced")
    with pytest.raises(LedgerUnavailable, match="deleted or replaced"):
        await ledger.open(opened("a2"))
    settlement = ledger.settle(settled())
    await failed_again(ledger)
    assert not settlement.done()
    kept.rename(path)
    ledger._file.check()
    assert await settlement is True
    await until(lambda: ledger.healthy)


async def test_a_running_ledger_notices_by_itself_that_its_file_is_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.stores.checkpoint.WATCH_EVERY_S", 0.001)
    ledger = SqliteLedger(path, price=price)
    path.unlink()  # noqa: ASYNC240  # a local file
    await until(lambda: not ledger.healthy)
    await ledger.close()


# Whether a ledger can be used at all


def test_the_check_makes_a_ledger_and_finds_it_good_again(path: Path) -> None:
    sqlite.check(path)
    assert path.stat().st_size
    sqlite.check(path)


def test_the_check_names_the_file_and_the_problem(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite.check(path)
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0)
    with Locked(path), pytest.raises(LedgerUnavailable, match=r"ledger\.db: database is locked"):
        sqlite.check(path)
    path.write_bytes(b"not SQLite at all" * 99)
    with pytest.raises(LedgerUnavailable, match=r"ledger\.db: file is not a database"):
        sqlite.check(path)
    with pytest.raises(LedgerUnavailable, match=r"other\.db: File exists"):
        sqlite.check(path / "other.db")
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE other (x)")
    with pytest.raises(SchemaMismatch, match=r"ledger\.db: this SQLite file is not a ctxgate ledger"):
        sqlite.check(path)
