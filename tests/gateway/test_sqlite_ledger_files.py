"""The SQLite ledger: spilled settlements, recovery, files and schema."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import LedgerUnavailable, Outcome, SchemaMismatch
from ctxgate.gateway.stores import recovery, schema
from ctxgate.gateway.stores.incarnation import Incarnation
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.usage import NOTHING_KNOWN
from support.ledgers import NOON_US, cost, opened, price, settled
from support.sqlite_ledger import Locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
async def ledger(path: Path) -> AsyncIterator[SqliteLedger]:
    """A ledger that gives up on a locked database at once and tries again soon."""
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0, retry_delays_s=(0.001,))
    yield ledger
    await ledger.close()


# Spilled settlements


async def spilled(path: Path, *, refuse_opening: bool = False) -> Path:
    """Close a ledger while its database is locked; returns the spill file."""
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0)
    if not refuse_opening:
        await ledger.open(opened())
    with Locked(path):
        if refuse_opening:
            with pytest.raises(LedgerUnavailable):
                await ledger.open(opened())
        settlement = ledger.settle(settled())
        await ledger.close()
        with pytest.raises(LedgerUnavailable):
            await settlement
    [file] = path.with_name("ledger.db.spill").iterdir()
    assert file.name == ledger.incarnation
    return file


@pytest.mark.parametrize("refuse_opening", [False, True])
async def test_api_b2_a_settlement_refused_until_the_end_is_written_at_the_next_start(
    path: Path, refuse_opening: bool
) -> None:
    file = await spilled(path, refuse_opening=refuse_opening)
    ledger = SqliteLedger(path, price=price)
    assert await ledger.recover() == []
    [attempt] = (await ledger.rows()).attempts
    assert (attempt.opened, attempt.settled) == (opened(), settled())
    assert not file.exists()
    assert await ledger.recover() == []
    await ledger.close()


async def test_taking_a_spill_over_twice_counts_once(path: Path) -> None:
    """As after a crash between the commit and the removal of the file."""
    file = await spilled(path)
    copy = file.read_bytes()
    ledger = SqliteLedger(path, price=price)
    await ledger.recover()
    file.write_bytes(copy)
    assert await ledger.recover() == []
    [row] = await ledger.report("task")
    await ledger.close()
    assert (row.attempts, row.cost_nano) == (1, 42)
    assert not file.exists()


async def test_a_torn_last_line_is_dropped_and_its_attempt_settled_as_crashed(path: Path) -> None:
    file = await spilled(path)
    whole = file.read_text()
    second = json.loads(whole) | {"attempt_id": "a2"}
    file.write_text(whole + json.dumps(second)[:-9])
    ledger = SqliteLedger(path, price=price, incarnation="next")
    await ledger.open(opened("a2"))
    await ledger.close()
    ledger = SqliteLedger(path, price=price)
    assert await ledger.recover() == ["a2"]
    outcomes = [attempt.settled.outcome for attempt in (await ledger.rows()).attempts]
    await ledger.close()
    assert outcomes == [Outcome.COMPLETED, Outcome.CRASHED]


@pytest.mark.parametrize("damage", ["not JSON\n", "{}\n", "[]\n"])
async def test_a_damaged_spill_file_stays_and_does_not_stop_the_start(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = await spilled(path)
    file.write_text(damage)
    ledger = SqliteLedger(path, price=price)
    assert await ledger.recover() == ["a1"]
    await ledger.close()
    assert file.read_text() == damage
    assert "damaged spill file" in caplog.text


async def test_closing_tells_when_not_even_the_spill_file_took_a_settlement(path: Path) -> None:
    path.with_name("ledger.db.spill").write_text("not a folder")
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0)
    await ledger.open(opened())
    with Locked(path):
        settlement = ledger.settle(settled())
        with pytest.raises(LedgerUnavailable, match="lost"):
            await ledger.close()
    with pytest.raises(LedgerUnavailable):
        await settlement


# Recovery


async def test_api_b22_recovery_of_many_attempts_takes_several_short_transactions(path: Path) -> None:
    first = SqliteLedger(path, price=price)
    count = 2 * recovery.CHUNK + 1
    await asyncio.gather(*(first.open(opened(f"a{i}")) for i in range(count)))
    await first.close()
    ledger = SqliteLedger(path, price=price)
    statements: list[str] = []
    ledger._writer.call(lambda connection: connection.set_trace_callback(statements.append)).result()
    assert sorted(await ledger.recover()) == sorted(f"a{i}" for i in range(count))
    [row] = await ledger.report("task")
    await ledger.close()
    assert (row.attempts, row.cost_nano) == (count, 28 * count)
    updates = [
        sum(statement.startswith("UPDATE") for statement in transaction.splitlines())
        for transaction in "\n".join(s.split("\n")[0][:6] for s in statements).split("BEGIN")
    ]
    assert [number for number in updates if number] == [recovery.CHUNK, recovery.CHUNK, 1]


async def test_a_pool_without_rates_leaves_the_cost_of_a_crash_unknown(path: Path) -> None:
    def no_rates(row: AttemptOpened, usage: Usage) -> Charge:
        raise KeyError(row.pool)

    first = SqliteLedger(path, price=no_rates)
    await first.open(opened())
    await first.close()
    ledger = SqliteLedger(path, price=no_rates)
    assert await ledger.recover() == ["a1"]
    [row] = await ledger.report("pool")
    [attempt] = (await ledger.rows()).attempts
    await ledger.close()
    assert (row.cost_nano, row.unknown_cost) == (0, 1)
    assert attempt.settled.charge.total is None
    assert attempt.settled.charge.rates_effective.isoformat() == "2026-11-30"


def test_a_crashed_attempt_predicted_to_hit_more_than_its_prompt() -> None:
    row = opened(predicted_cached_tokens=120, estimated_prompt_tokens=100)
    usage = recovery.crashed_usage(row)
    assert (usage.uncached.value, usage.cached.value, usage.prompt) == (0, 100, 100)


def test_a_clock_that_went_back_gives_no_negative_duration() -> None:
    settlement = recovery.crashed(opened(), lambda row, usage: cost(None), NOON_US - 1)
    assert (settlement.total_us, settlement.settled_at_us) == (0, NOON_US - 1)


def test_a_crashed_attempt_without_an_estimate_is_unknown() -> None:
    assert recovery.crashed_usage(opened(estimated_prompt_tokens=None)) == NOTHING_KNOWN


# Processes


async def test_a_clean_stop_leaves_only_the_database(path: Path) -> None:
    ledger = SqliteLedger(path, price=price)
    lock = path.with_name("ledger.db.locks") / ledger.incarnation
    assert lock.exists()
    await ledger.open(opened())
    await ledger.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["ledger.db", "ledger.db.locks"]
    assert [file.name for file in lock.parent.iterdir()] == [".setup"]


def test_a_process_is_dead_once_its_lock_is_free(tmp_path: Path) -> None:
    first, second = Incarnation(tmp_path, "first"), Incarnation(tmp_path, "second")
    (tmp_path / "old").touch()
    with second.exclusively():
        assert not second.is_dead("first")
        assert not second.is_dead("second")
        assert second.is_dead("old")
        assert second.is_dead("never existed")
        assert second.dead() == ["old"]
        second.forget("old")
        assert second.dead() == []
    first.end()
    first.end()
    with second.exclusively():
        assert second.is_dead("first")
    second.end()


async def test_recovery_removes_the_lock_files_of_dead_processes(path: Path) -> None:
    ledger = SqliteLedger(path, price=price)
    locks = path.with_name("ledger.db.locks")
    (locks / "dead").touch()
    await ledger.recover()
    assert {file.name for file in locks.iterdir()} == {".setup", ledger.incarnation}
    await ledger.close()


# The file


def test_only_its_owner_reads_the_ledger(path: Path) -> None:
    asyncio.run(SqliteLedger(path, price=price).close())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_ledger_is_of_the_present_version(path: Path) -> None:
    asyncio.run(SqliteLedger(path, price=price).close())
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
        assert connection.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(("synchronous", "level"), [("NORMAL", 1), ("FULL", 2)])
async def test_durability_is_the_callers_choice(path: Path, synchronous: str, level: int) -> None:
    ledger = SqliteLedger(path, price=price, synchronous=synchronous)  # type: ignore[arg-type]  # both are valid
    found = ledger._writer.call(lambda connection: connection.execute("PRAGMA synchronous").fetchone())
    assert found.result() == (level,)
    await ledger.close()


def test_an_older_ledger_is_brought_forward_with_its_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write() -> None:
        ledger = SqliteLedger(path, price=price)
        await asyncio.gather(ledger.open(opened()), ledger.settle(settled()))
        await ledger.close()

    asyncio.run(write())
    later = (*schema.MIGRATIONS, ("ALTER TABLE attempts ADD COLUMN later TEXT",))
    monkeypatch.setattr(schema, "MIGRATIONS", later)
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(SchemaMismatch, match="start the gateway once"):
        LedgerReader(path)
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        assert [attempt.settled for attempt in reader.rows().attempts] == [settled()]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT later FROM attempts").fetchall() == [(None,)]


def test_a_failing_migration_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(SqliteLedger(path, price=price).close())
    version = schema.VERSION
    broken = (*schema.MIGRATIONS, ("CREATE TABLE extra (x) STRICT", "not SQL"))
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(sqlite3.OperationalError):
        SqliteLedger(path, price=price)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
        query = "SELECT count(*) FROM sqlite_master WHERE name = 'extra'"
        assert connection.execute(query).fetchone() == (0,)


def test_a_newer_ledger_is_refused(path: Path) -> None:
    asyncio.run(SqliteLedger(path, price=price).close())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 999")
    with pytest.raises(SchemaMismatch, match="999"):
        SqliteLedger(path, price=price)
    with pytest.raises(SchemaMismatch, match="999"):
        LedgerReader(path)


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match="not a ctxgate ledger"):
        SqliteLedger(path, price=price)
    assert path.read_bytes() == before


def test_reading_a_missing_ledger_creates_nothing(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such ledger"):
        LedgerReader(path)
    assert not path.exists()


async def test_a_report_reads_while_the_gateway_writes_and_cannot_write(
    ledger: SqliteLedger, path: Path
) -> None:
    await asyncio.gather(ledger.open(opened()), ledger.settle(settled()))
    with LedgerReader(path) as reader:
        with Locked(path):
            assert [row.attempts for row in reader.report("task")] == [1]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._connection.execute("DELETE FROM attempts")


async def test_a_snapshot_does_not_move_under_a_report(ledger: SqliteLedger, path: Path) -> None:
    with LedgerReader(path) as reader:
        with reader.snapshot():
            assert reader.report("task") == []
            await asyncio.gather(ledger.open(opened()), ledger.settle(settled()))
            assert reader.report("task") == []
        assert [row.attempts for row in reader.report("task")] == [1]


QUERIES = {
    "a tenant's day": (
        "SELECT sum(cost_total_nano) FROM attempts"
        " WHERE organisation = 'a' AND team = 't' AND opened_at_us >= 1 AND opened_at_us < 9",
        "attempts_tenant",
    ),
    "processes with open attempts": (
        "SELECT DISTINCT incarnation FROM attempts WHERE settled_at_us IS NULL",
        "attempts_open",
    ),
    "a process's open attempts": (
        "SELECT task FROM attempts WHERE incarnation = 'i' AND settled_at_us IS NULL ORDER BY seq LIMIT 500",
        "attempts_open",
    ),
    "a task": (
        "SELECT sum(cost_total_nano) FROM attempts WHERE task = 't' AND opened_at_us >= 0",
        "attempts_task",
    ),
    "the last hours": (
        "SELECT pool, count(*) FROM attempts WHERE opened_at_us >= 1 GROUP BY pool",
        "attempts_time",
    ),
    "an attempt": ("SELECT task FROM attempts WHERE attempt_id = 'a'", "sqlite_autoindex_attempts_1"),
}


@pytest.mark.parametrize("name", QUERIES)
def test_frequent_queries_use_an_index(path: Path, name: str) -> None:
    query, index = QUERIES[name]
    asyncio.run(SqliteLedger(path, price=price).close())
    with closing(sqlite3.connect(path)) as connection:
        plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
    assert index in plan
    assert "TEMP B-TREE FOR ORDER BY" not in plan


@pytest.mark.parametrize(
    ("tokens", "certainty"),
    [(5, "unknown"), (5, None), (-1, "measured"), (None, "measured"), (None, None), (5, "guessed")],
)
async def test_the_table_itself_keeps_unknown_and_zero_apart(
    ledger: SqliteLedger, path: Path, tokens: int | None, certainty: str | None
) -> None:
    await asyncio.gather(ledger.open(opened()), ledger.settle(settled()))
    update = "UPDATE attempts SET cached_tokens = ?, cached_certainty = ?"
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute(update, (tokens, certainty))
