"""First-seen forms in the ledger's file: older files, locks, and the order of closing."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores import schema
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled
from support.sqlite_ledger import hold

if TYPE_CHECKING:
    from collections.abc import Callable
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


# ---- claims among the ledger's rows ----------------------------------------------------------------


async def test_claims_share_the_ledgers_transaction(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db", price=price)
    statements: list[str] = []
    release = hold(ledger)
    ledger._writer.call(lambda connection: connection.set_trace_callback(statements.append))
    steps: list[asyncio.Future[Any]] = []
    for number in range(20):
        steps += [
            ledger.open(opened(f"a{number}")),
            asyncio.ensure_future(ledger.forms.claim("t", {KEY: b"%d" % number}, (), number)),
            ledger.settle(settled(f"a{number}")),
        ]
        await asyncio.sleep(0)  # the claim is on its way
    ledger._writer.flush()
    release()
    results = await asyncio.gather(*steps)
    assert results == [None, {KEY: b"0"}, True] * 20
    assert statements.count("COMMIT") == 2  # the held call's own and one for all
    assert len((await ledger.rows()).attempts) == 20
    assert ledger.pending == 0
    await ledger.close()


def failing(error: Exception) -> Callable[[sqlite3.Connection], dict[bytes, bytes]]:
    """A function that writes a form and then fails."""

    def function(connection: sqlite3.Connection) -> dict[bytes, bytes]:
        connection.execute(
            "INSERT INTO forms (tenant, key, text, seen_us) VALUES ('t', zeroblob(32), x'01', 1)"
        )
        raise error

    return function


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("no"), ValueError), (sqlite3.IntegrityError("no"), LedgerUnavailable)],
)
async def test_a_claim_that_fails_undoes_itself_and_nothing_else(
    tmp_path: Path, error: Exception, told: type[Exception], one_by_one: bool
) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(path, price=price)
    await ledger.open(opened("first"))
    release = hold(ledger)
    before = ledger.forms.claim("t", {KEY: b"one"}, (), 1)
    steps: list[Any] = [ledger.open(opened("a")), ledger.settle(settled("a")), before]
    steps.append(ledger._writer.join(failing(error)))
    steps += [ledger.forms.claim("t", {OTHER: b"two"}, (), 1), ledger.settle(settled("first"))]
    if one_by_one:  # a settlement of nothing keeps the batch from being written at once
        steps.append(ledger.settle(settled("never opened")))
    gathered = asyncio.gather(*steps, return_exceptions=True)
    await asyncio.sleep(0)
    ledger._writer.flush()
    release()
    results = await gathered
    assert isinstance(results.pop(3), told)
    assert results[:5] == [None, True, {KEY: b"one"}, {OTHER: b"two"}, True]
    assert {attempt.opened.attempt_id for attempt in (await ledger.rows()).attempts} == {"first", "a"}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT key FROM forms ORDER BY key").fetchall() == [(KEY,), (OTHER,)]
    assert ledger.healthy
    await ledger.close()


async def test_a_transaction_that_a_claim_brings_down_keeps_its_settlements(tmp_path: Path) -> None:
    """Some errors (a full disk, no memory) make SQLite roll everything back by itself."""

    def gives_up(connection: sqlite3.Connection) -> dict[bytes, bytes]:
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    ledger = SqliteLedger(tmp_path / "ledger.db", price=price, retry_delays_s=(0.0,))
    await ledger.open(opened("a"))
    release = hold(ledger)
    settling, opening = ledger.settle(settled("a")), ledger.open(opened("b"))
    joined = ledger._writer.join(gives_up)
    release()
    with pytest.raises(LedgerUnavailable):
        await joined
    with pytest.raises(LedgerUnavailable):
        await opening
    assert await settling is True
    await ledger.close()


async def test_the_writer_survives_an_outage_in_which_callers_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db", price=price, retry_delays_s=(0.0,))

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    release = hold(ledger)
    opening = ledger.open(opened("a"))
    ledger._writer.flush()
    given_up = ledger._writer.call(lambda _: None)
    claim = asyncio.ensure_future(ledger.forms.claim("t", {KEY: b"one"}, (), 1))
    await asyncio.sleep(0)
    assert given_up.cancel()
    claim.cancel()
    with monkeypatch.context() as outage:
        outage.setattr(ledger._writer._transactions, "write", full)
        release()
        with pytest.raises(LedgerUnavailable):
            await opening
    assert await ledger.forms.claim("t", {KEY: b"two"}, (), 1) == {KEY: b"two"}
    await ledger.close()
