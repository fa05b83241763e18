"""The SQLite ledger: group commit, a failing disk, spilled settlements, files and schema."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import InvalidRow, LedgerUnavailable, Outcome, SchemaMismatch
from ctxgate.gateway.stores import recovery, schema
from ctxgate.gateway.stores.checkpoint import EVERY, Checkpointer
from ctxgate.gateway.stores.incarnation import Incarnation
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.usage import NOTHING_KNOWN
from support.ledgers import NOON_US, cost, opened, price, settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
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


class Locked:
    """Another process's write transaction, held from `with` to its end."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


def hold(ledger: SqliteLedger) -> Callable[[], None]:
    """Stop the writer thread until the returned function is called."""
    gate = threading.Event()
    ledger._writer.call(lambda _: gate.wait())
    return gate.set


async def failed_again(ledger: SqliteLedger) -> None:
    """Return once the writer has failed one more time than now."""
    before = ledger.failures
    while ledger.failures == before:  # noqa: ASYNC110  # the writer is a thread and knows no event
        await asyncio.sleep(0)


# Group commit


async def test_what_queues_up_behind_a_commit_shares_the_next_one(ledger: SqliteLedger) -> None:
    statements: list[str] = []
    release = hold(ledger)
    ledger._writer.call(lambda connection: connection.set_trace_callback(statements.append))
    futures = [
        step for i in range(500) for step in (ledger.open(opened(f"a{i}")), ledger.settle(settled(f"a{i}")))
    ]
    assert ledger.pending == 1_000
    await asyncio.sleep(0)  # now everything is handed to the writer
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
    await asyncio.sleep(0)  # now everything is handed to the writer
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
        checkpointer = Checkpointer(path, every=10)
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

    connection = ledger._writer._connection  # the limit is the connection's, and SQLite serializes its use
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
    later = (*schema.MIGRATIONS, ("ALTER TABLE attempts ADD COLUMN miss_cause TEXT",))
    monkeypatch.setattr(schema, "MIGRATIONS", later)
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(SchemaMismatch, match="start the gateway once"):
        LedgerReader(path)
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        assert [attempt.settled for attempt in reader.rows().attempts] == [settled()]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT miss_cause FROM attempts").fetchall() == [(None,)]


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
