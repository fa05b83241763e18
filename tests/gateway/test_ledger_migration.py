"""A ledger of version 4 becomes one of version 5: whatever it holds, whoever has it open, however it dies."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import Attempt, Outcome, SchemaMismatch
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.gateway.stores import rows, schema
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, UNKNOWN, Usage, estimated, measured
from support.ledgers import cost, opened, price, settled, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled

pytestmark = pytest.mark.integration

OLD: Final = 4
STATEMENTS: Final = 9
"""What a migration from version 4 executes: its beginning, a look at the version, four columns, two marks in
the header, its end."""

USAGES: Final = {
    Outcome.COMPLETED: (Usage(measured(20), measured(80), measured(7)), cost(42)),
    Outcome.CLIENT_DISCONNECTED: (Usage(estimated(20), measured(80), estimated(7)), cost(41)),
    Outcome.REJECTED: (NOTHING_USED, cost(0)),
    Outcome.CRASHED: (Usage(estimated(20), estimated(80), UNKNOWN), cost(28)),
    Outcome.FAILED: (NOTHING_KNOWN, cost(None)),
}
KILLED: Final = """
import os, signal, sys
from pathlib import Path
from ctxgate.gateway.stores import schema

migrate, left = schema.migrate, int(sys.argv[2])

def killed(connection, name):
    def step(statement):
        global left
        if statement.startswith("--"):  # inside another one
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    connection.set_trace_callback(step)
    migrate(connection, name)
    connection.set_trace_callback(None)

schema.migrate = killed
schema.connect(Path(sys.argv[1]), busy_timeout_s=5.0, synchronous="NORMAL").close()
"""
OPENS: Final = """
import sys
import time
from pathlib import Path
from ctxgate.gateway.stores import schema
print("ready", flush=True)
sys.stdin.readline()
with_it = schema.connect(Path(sys.argv[1]), busy_timeout_s=30.0, synchronous="NORMAL")
print(with_it.execute("PRAGMA user_version").fetchone()[0], flush=True)
with_it.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def old_insert(connection: sqlite3.Connection, row: AttemptOpened, incarnation: str = "earlier") -> None:
    """What a process of version 4 executes to open an attempt."""
    names = [name for name in rows.OPENED_COLUMNS if name not in rows.ROUTING_COLUMNS]
    values = dict(zip(rows.OPENED_COLUMNS, rows.opened_values(row), strict=True))
    places = ", ".join("?" * (len(names) + 1))
    connection.execute(
        f"INSERT INTO attempts ({', '.join(names)}, incarnation) VALUES ({places})",
        (*(values[name] for name in names), incarnation),
    )


def old_settle(connection: sqlite3.Connection, row: AttemptSettled) -> None:
    """What a process of version 4 executes to settle an attempt; version 5 has the same columns."""
    connection.execute(rows.SETTLE, (*rows.settled_values(row), row.attempt_id))


def history() -> list[tuple[AttemptOpened, AttemptSettled]]:
    """One attempt of every outcome, with every purpose, with and without a miss and counterfactuals."""
    found = []
    for number, outcome in enumerate(Outcome):
        usage, charge = USAGES.get(outcome, USAGES[Outcome.COMPLETED])
        miss = Miss(MissCause.SALT, "salt", None, number, None, number, None) if number % 2 else None
        purpose = ("answer", "summary", "recall")[number % 3]
        found.append(
            (
                opened(f"a{number}", purpose=purpose, client_tokens=number if number % 3 else None),
                settled(
                    f"a{number}",
                    outcome=outcome,
                    usage=usage,
                    charge=charge,
                    miss=miss,
                    plain_nano=-number if number % 2 else None,
                ),
            )
        )
    return found


@pytest.fixture
def old(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[AttemptOpened, AttemptSettled]]:
    """A file of version 4 that holds `history()` and an attempt that a dead process left open."""
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:OLD])
        older.setattr(schema, "VERSION", OLD)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            for before, after in history():
                old_insert(connection, before)
                old_settle(connection, after)
            old_insert(connection, opened("left open"))
    return history()


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def held(path: Path) -> tuple[Attempt, ...]:
    with LedgerReader(path) as reader:
        return reader.rows(limit=1000).attempts


def as_attempts(found: Sequence[tuple[AttemptOpened, AttemptSettled]]) -> list[Attempt]:
    return [Attempt(*each) for each in found]


async def test_every_outcome_and_what_was_left_open_survives(path: Path, old: Any) -> None:
    ledger = SqliteLedger(path, price=price)
    assert held(path) == tuple(as_attempts(old))
    assert await ledger.recover() == ["left open"]
    await ledger.close()
    (last,) = held(path)[len(old) :]
    assert last.opened == opened("left open")
    assert (last.settled.outcome, last.settled.charge.total) == (Outcome.CRASHED, 28)


@pytest.mark.parametrize("executed", range(STATEMENTS))
def test_kill_9_after_any_statement_leaves_version_4_whole_and_the_next_start_migrates_it(
    path: Path, old: Any, executed: int
) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED, str(path), str(executed)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert version_of(path) == OLD
    schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL").close()
    assert version_of(path) == schema.VERSION
    assert held(path) == tuple(as_attempts(old))


def test_a_migration_has_as_many_statements_as_were_killed(path: Path, old: Any) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED, str(path), str(STATEMENTS)], check=False)
    assert (child.returncode, version_of(path)) == (0, schema.VERSION)
    assert held(path) == tuple(as_attempts(old))


@pytest.mark.parametrize("fresh", [False, True])
def test_processes_that_open_it_at_once_migrate_it_once(path: Path, old: Any, *, fresh: bool) -> None:
    target = path.with_name("fresh.db") if fresh else path
    command = [sys.executable, "-c", OPENS, str(target)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(4)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        told = [child.communicate() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    assert told == [(f"{schema.VERSION}\n", "")] * 4
    assert version_of(target) == schema.VERSION
    assert held(target) == (() if fresh else tuple(as_attempts(old)))


def test_a_file_that_another_process_switches_to_wal_mode_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses a second one at once, however long it may wait."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:
                other.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", wait)
        schema.connect(path, busy_timeout_s=60.0, synchronous="NORMAL").close()
    assert (len(waited), version_of(path)) == (2, schema.VERSION)


class Watched:
    """A connection beside which another process creates the ledger before one of its statements."""

    def __init__(self, connection: sqlite3.Connection, other: Path, before: int) -> None:
        self.connection = connection
        self.other = other
        self.before = before
        self.executed = 0

    def execute(self, statement: str) -> sqlite3.Cursor:
        self.executed += 1
        if self.executed == self.before:
            schema.connect(self.other, busy_timeout_s=1.0, synchronous="NORMAL").close()
        return self.connection.execute(statement)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_file_that_another_process_creates_meanwhile_is_not_taken_for_a_strangers(
    path: Path, before: int
) -> None:
    """Version, mark and tables are those of one moment, not some before and some after."""
    with closing(sqlite3.connect(path)) as connection:
        watched: Any = Watched(connection, path, before)
        assert schema._checked_version(watched, str(path)) in (0, schema.VERSION)


def test_a_process_of_version_4_goes_on_writing_and_reading_beside_one_that_has_migrated(
    path: Path, old: Any
) -> None:
    """As while the gateways of one machine are replaced one after the other."""
    with closing(sqlite3.connect(path, isolation_level=None)) as former:
        old_insert(former, opened("before"))
        schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL").close()
        old_settle(former, settled("before"))
        old_insert(former, opened("after"))
        old_settle(former, settled("after"))
        names = ", ".join(name for name in rows.OPENED_COLUMNS if name not in rows.ROUTING_COLUMNS)
        assert len(former.execute(f"SELECT {names} FROM attempts").fetchall()) == len(old) + 3
    assert held(path)[-2:] == tuple(Attempt(opened(name), settled(name)) for name in ("before", "after"))


def test_a_program_of_version_4_says_that_it_cannot_read_version_5(
    path: Path, old: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL").close()
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:OLD])
        older.setattr(schema, "VERSION", OLD)
        with pytest.raises(SchemaMismatch, match="version 5; this program knows up to 4"):
            LedgerReader(path)
        with pytest.raises(SchemaMismatch):
            schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")
        assert main(["report", "--db", str(path)]) == 2
        assert "version 5; this program knows up to 4" in capsys.readouterr().err
    assert held(path) == tuple(as_attempts(old))


def test_a_report_asks_for_one_start_of_the_gateway_and_changes_nothing(
    path: Path, old: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--db", str(path), "--by", "class"]) == 2
    assert "start the gateway once" in capsys.readouterr().err
    assert version_of(path) == OLD


async def test_by_class_what_version_4_wrote_is_unknown_and_not_the_default_class(
    path: Path, old: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = SqliteLedger(path, price=price)
    await write(
        ledger,
        (opened("new", job_class="agent"), settled("new")),
        (opened("other", job_class="batch"), settled("other")),
    )
    found = await ledger.report("class")
    savings = await ledger.savings("class")
    await ledger.close()
    known = sum(after.charge.total or 0 for _, after in old)
    assert [(row.group, row.attempts, row.cost_nano) for row in found] == [
        ("agent", 1, 42),
        ("batch", 1, 42),
        ("unknown", len(old), known),
    ]
    assert [row.group for row in savings] == ["agent", "batch", "unknown"]
    assert main(["report", "--db", str(path), "--by", "class", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["group"]: row["attempts"] for row in document["rows"]} == {
        "agent": 1,
        "batch": 1,
        "unknown": len(old),
    }
    assert document["total"]["attempts"] == len(old) + 2
