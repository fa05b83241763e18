"""First-seen forms in the ledger's file: older files, locks, and the order of closing."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores import schema
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER = b"k" * 32, b"o" * 32


async def test_a_ledger_of_version_one_is_brought_forward(tmp_path: Path) -> None:
    """Made by the statements of the first version; opened by this one."""
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        for statement in schema.MIGRATIONS[0]:
            old.execute(statement)
        old.execute("PRAGMA user_version = 1")
        old.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        assert old.execute("SELECT name FROM sqlite_master WHERE name = 'forms'").fetchall() == []
    ledger = SqliteLedger(path, price=price)
    await asyncio.gather(ledger.open(opened()), ledger.settle(settled()))
    assert await ledger.forms.claim("t", {KEY: b"one"}, (), 7) == {KEY: b"one"}
    assert [attempt.settled for attempt in (await ledger.rows()).attempts] == [settled()]
    await ledger.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT tenant, key, text, seen_us FROM forms").fetchall() == [
            ("t", KEY, b"one", 7)
        ]


async def test_a_locked_file_refuses_claims_and_still_answers_reads(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(path, price=price, busy_timeout_s=0)
    await ledger.forms.claim("t", {KEY: b"one"}, (), 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailable):
            await ledger.forms.claim("t", {OTHER: b"two"}, (KEY,), 2)
        assert await ledger.forms.claim("t", {}, (KEY, OTHER), 3) == {KEY: b"one"}
        other.execute("ROLLBACK")
    assert await ledger.forms.claim("t", {OTHER: b"two"}, (KEY,), 4) == {KEY: b"one", OTHER: b"two"}
    await ledger.close()


async def test_a_claim_whose_waiter_gave_up_does_no_harm(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db", price=price)
    waiting = asyncio.ensure_future(ledger.forms.claim("t", {KEY: b"one"}, (), 1))
    await asyncio.sleep(0)
    waiting.cancel()
    assert (await ledger.forms.claim("t", {KEY: b"two"}, (), 2))[KEY] in (b"one", b"two")
    await ledger.open(opened())
    assert await ledger.settle(settled()) is True
    await ledger.close()
    with pytest.raises(LedgerClosed):
        await ledger.forms.claim("t", {}, (KEY,), 3)
