"""The SQLite ledger: what earlier versions wrote is read by this one."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.gateway.stores import rows, schema, spill
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_a_ledger_of_version_2_is_read_and_its_rows_have_no_misses(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were written without the columns of a miss."""
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        older.setattr(schema, "VERSION", 2)
        with closing(schema.connect(path, busy_timeout_s=1.0, synchronous="NORMAL")) as connection:
            connection.execute(rows.INSERT, (*rows.opened_values(opened()), "earlier"))
            columns = [name for name in rows.SETTLED_COLUMNS if name not in rows.MISS_COLUMNS]
            values = rows.settled_values(settled())[: len(columns)]
            connection.execute(
                f"UPDATE attempts SET {', '.join(f'{name} = ?' for name in columns)}",
                values,
            )
    asyncio.run(SqliteLedger(path, price=price).close())
    with LedgerReader(path) as reader:
        assert [attempt.settled for attempt in reader.rows().attempts] == [settled()]
        assert reader.misses() == []


def test_a_settlement_that_an_earlier_version_spilled_is_read(tmp_path: Path) -> None:
    file = tmp_path / "spilled"
    spill.write(file, [spill.Spilled(settled(), opened())])
    line = json.loads(file.read_text())
    for name in rows.MISS_COLUMNS:
        del line["settled"][name]
    file.write_text(json.dumps(line) + "\n")
    assert list(spill.chunks(file, 10)) == [[spill.Spilled(settled(), opened())]]


def test_a_miss_survives_the_spill_file(tmp_path: Path) -> None:
    miss = Miss(MissCause.SALT, "salt", "cache_salt", None, None, 12, 34)
    row = spill.Spilled(settled(miss=miss), None)
    spill.write(tmp_path / "spilled", [row])
    assert list(spill.chunks(tmp_path / "spilled", 10)) == [[row]]
