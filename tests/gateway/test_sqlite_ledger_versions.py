"""The SQLite ledger: what earlier versions wrote is read by this one."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import Attempt
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.gateway.stores import rows, schema, spill
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled, write

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptSettled


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def insert_opened(connection: sqlite3.Connection) -> None:
    """An opening row as it was written before version 4."""
    columns = [name for name in rows.OPENED_COLUMNS if name not in rows.ADDED_COLUMNS]
    values = dict(zip(rows.OPENED_COLUMNS, rows.opened_values(opened()), strict=True))
    names = ", ".join([*columns, "incarnation"])
    connection.execute(
        f"INSERT INTO attempts ({names}) VALUES ({', '.join('?' * (len(columns) + 1))})",
        (*(values[name] for name in columns), "earlier"),
    )


def settle(connection: sqlite3.Connection, row: AttemptSettled, *, without: Sequence[str]) -> None:
    """A settlement as it was written when there were no such columns."""
    values = dict(zip(rows.SETTLED_COLUMNS, rows.settled_values(row), strict=True))
    columns = [name for name in rows.SETTLED_COLUMNS if name not in without]
    connection.execute(
        f"UPDATE attempts SET {', '.join(f'{name} = ?' for name in columns)}",
        [values[name] for name in columns],
    )


def test_a_ledger_of_version_2_is_read_and_its_rows_have_no_misses(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were written without the columns of a miss."""
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        older.setattr(schema, "VERSION", 2)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            insert_opened(connection)
            settle(connection, settled(), without=(*rows.MISS_COLUMNS, *rows.COUNTERFACTUAL_COLUMNS))
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        assert [attempt.settled for attempt in reader.rows().attempts] == [settled()]
        assert reader.misses() == []


def test_what_a_ledger_of_version_3_holds_are_answers_to_prompts_that_were_not_compacted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss = Miss(MissCause.SALT, "salt", "cache_salt", None, None, 12, 34)
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
        older.setattr(schema, "VERSION", 3)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            insert_opened(connection)
            settle(connection, settled(miss=miss), without=rows.COUNTERFACTUAL_COLUMNS)
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        [attempt] = reader.rows().attempts
    assert attempt.settled == settled(miss=miss)
    assert attempt.opened == opened()
    assert (attempt.opened.purpose, attempt.opened.client_tokens) == ("answer", None)


def test_an_opening_that_was_queued_before_version_4_is_the_same_row_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is replaced by one of this version repeats its opening: no conflict."""
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
        older.setattr(schema, "VERSION", 3)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            insert_opened(connection)

    async def repeat() -> None:
        ledger = SqliteLedger(path, price=price)
        await write(ledger, (opened(), settled()))
        await ledger.close()

    asyncio.run(repeat())


def test_what_a_call_was_for_is_kept(path: Path) -> None:
    row = opened(purpose="summary", client_tokens=123_456)
    end = settled(plain_nano=-5, fixed_nano=77)

    async def write_it() -> None:
        ledger = SqliteLedger(path, price=price)
        await write(ledger, (row, end))
        await ledger.close()

    asyncio.run(write_it())
    with LedgerReader(path) as reader:
        assert reader.rows().attempts == (Attempt(row, end),)


def test_what_a_ledger_of_version_4_holds_says_nothing_of_routing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:4])
        older.setattr(schema, "VERSION", 4)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            insert_opened(connection)
            settle(connection, settled(), without=())
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        [attempt] = reader.rows().attempts
    assert attempt == Attempt(opened(), settled())
    told = attempt.opened
    assert (told.job_class, told.predicted_ttft_us, told.fits, told.policy) == (None,) * 4


@pytest.mark.parametrize("fits", [True, False, None])
def test_what_was_predicted_of_a_call_is_kept(path: Path, fits: bool | None) -> None:
    row = opened(job_class="batch", predicted_ttft_us=1_234_567, fits=fits, policy="ctxgate")

    async def write_it() -> None:
        ledger = SqliteLedger(path, price=price)
        await write(ledger, (row, settled()))
        await ledger.close()

    asyncio.run(write_it())
    with LedgerReader(path) as reader:
        [attempt] = reader.rows().attempts
    assert attempt.opened == row
    assert attempt.opened.fits is fits


def test_a_settlement_that_an_earlier_version_spilled_is_read(tmp_path: Path) -> None:
    file = tmp_path / "spilled"
    spill.write(file, [spill.Spilled(settled(), opened())])
    line = json.loads(file.read_text())
    for name in (*rows.MISS_COLUMNS, *rows.COUNTERFACTUAL_COLUMNS):
        del line["settled"][name]
    for name in rows.ADDED_COLUMNS:
        del line["opened"][name]
    file.write_text(json.dumps(line) + "\n")
    assert list(spill.chunks(file, 10)) == [[spill.Spilled(settled(), opened())]]


def test_a_miss_survives_the_spill_file(tmp_path: Path) -> None:
    miss = Miss(MissCause.SALT, "salt", "cache_salt", None, None, 12, 34)
    row = spill.Spilled(settled(miss=miss), None)
    spill.write(tmp_path / "spilled", [row])
    assert list(spill.chunks(tmp_path / "spilled", 10)) == [[row]]
