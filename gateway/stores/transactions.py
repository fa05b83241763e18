"""Transactions on the ledger's one writing connection. Each is whole or, with its error, not there."""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import TYPE_CHECKING, Final, TypeVar

from ctxgate.gateway.ledger import AttemptConflict, InvalidRow, LedgerError, LedgerUnavailable, UnknownAttempt
from ctxgate.gateway.stores import bulk
from ctxgate.gateway.stores.operations import Join, Open, Settle, settled_before_opened
from ctxgate.gateway.stores.recovery import apply_spilled
from ctxgate.gateway.stores.results import unavailable
from ctxgate.gateway.stores.rows import INSERT, OPENED_COLUMNS, SETTLE, opened_values, settled_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled
    from ctxgate.gateway.stores.operations import Batched
    from ctxgate.gateway.stores.results import Result
    from ctxgate.gateway.stores.spill import Spilled
    from ctxgate.gateway.stores.watch import FileWatch

log = logging.getLogger(__name__)

T = TypeVar("T")

CONTENTION_PAUSE_S: Final = 0.0002
_EXISTING: Final = f"SELECT {', '.join(OPENED_COLUMNS)} FROM attempts WHERE attempt_id = ?"  # noqa: S608  # names
_BAD_CONTENTS: Final = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    AttributeError,
    OverflowError,
    TypeError,
    ValueError,
)


class Transactions:
    """Blocks; belongs to the writer's thread. `file` says whether writing still makes sense."""

    def __init__(
        self, connection: sqlite3.Connection, incarnation: str, *, file: FileWatch, busy_timeout_s: float
    ) -> None:
        self._connection = connection
        self._incarnation = incarnation
        self._file = file
        self._busy_timeout_s = busy_timeout_s

    def write(self, batch: list[Batched], refused: Mapping[str, AttemptOpened]) -> list[Result]:
        """Carry operations out; a settlement brings the opening with it that was refused before."""
        try:
            return (None if refused else self._at_once(batch)) or self._each(batch, refused)
        except BaseException:
            self._rollback()
            raise

    def replay(self, rows: Sequence[Spilled]) -> list[str]:
        """Write spilled settlements; returns the ids that have no row."""
        return self.run(lambda connection: apply_spilled(connection, rows, self._incarnation))

    def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function in a transaction."""
        try:
            self._begin()
            result = function(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise
        return result

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _at_once(self, batch: list[Batched]) -> list[Result] | None:
        """Write a batch in few statements; None, and nothing written, unless every operation is a plain one.

        Each statement gives the interpreter's lock away and waits to get it back from a busy event loop,
        so their number is what a busy writer costs. What is not plain, such as an id seen before, is found
        out by writing one operation at a time.
        """
        if settled_before_opened(batch):
            return None
        opened = [operation.row for operation in batch if isinstance(operation, Open)]
        settled = [operation.row for operation in batch if isinstance(operation, Settle)]
        self._begin()
        try:
            plain = bulk.insert(self._connection, opened, self._incarnation)
            plain = plain and bulk.settle(self._connection, settled)
        except _BAD_CONTENTS:
            plain = False
        if not plain:
            self._rollback()
            return None
        results: list[Result] = [
            self._join(operation) if isinstance(operation, Join) else isinstance(operation, Settle) or None
            for operation in batch
        ]
        self._connection.execute("COMMIT")
        return results

    def _each(self, batch: list[Batched], refused: Mapping[str, AttemptOpened]) -> list[Result]:
        self._begin()
        results: list[Result] = [
            self._join(operation) if isinstance(operation, Join) else self._apply(operation, refused)
            for operation in batch
        ]
        self._connection.execute("COMMIT")
        return results

    def _begin(self) -> None:
        """Take the write lock, for which other processes compete.

        SQLite's own busy handler backs off to 100 ms between tries and starves beside a busy process, so
        the connection has none: this one asks again after a fraction of a usual transaction.
        """
        if self._file.lost:
            raise LedgerUnavailable("the ledger's file was deleted or replaced")
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= deadline:
                    raise
                time.sleep(CONTENTION_PAUSE_S)
            else:
                return

    def _apply(self, operation: Open | Settle, refused: Mapping[str, AttemptOpened]) -> Result:
        """Carry one operation out. Bad contents are its own result; other errors end the transaction."""
        try:
            if isinstance(operation, Open):
                result = self._insert(operation.row)
            else:
                result = self._settle(operation.row, refused)
        except _BAD_CONTENTS as error:
            result = InvalidRow(f"attempt {operation.row.attempt_id}: {type(error).__name__}: {error}")
            result.__cause__ = error
        if isinstance(result, LedgerError):
            log.error("%s: %s", type(result).__name__, result)
        return result

    def _join(self, operation: Join) -> Result:
        """Run a function within the transaction; its failure is its own result, and undoes what it did.

        Where SQLite has given up the whole transaction over it, that fails.
        """
        self._connection.execute("SAVEPOINT joined")
        result: Result
        try:
            result = operation.function(self._connection)
        except Exception as error:  # handed to the caller, whose function it is
            if not self._connection.in_transaction:
                raise
            self._connection.execute("ROLLBACK TO joined")
            result = unavailable(error) if isinstance(error, sqlite3.Error) else error
        self._connection.execute("RELEASE joined")
        return result

    def _insert(self, row: AttemptOpened) -> Result:
        values = opened_values(row)
        if self._connection.execute(INSERT, (*values, self._incarnation)).rowcount:
            return None
        if self._connection.execute(_EXISTING, (row.attempt_id,)).fetchone() == values:
            return None
        return AttemptConflict(f"attempt {row.attempt_id} was opened before with other contents")

    def _settle(self, row: AttemptSettled, refused: Mapping[str, AttemptOpened]) -> Result:
        opening = refused.get(row.attempt_id)
        if opening is not None:
            self._insert(opening)
        if self._connection.execute(SETTLE, (*settled_values(row), row.attempt_id)).rowcount:
            return True
        if self._connection.execute(_EXISTING, (row.attempt_id,)).fetchone():
            return False
        return UnknownAttempt(f"attempt {row.attempt_id} was never opened")

    def _rollback(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            log.exception("the ledger could not roll a transaction back")


def touch(connection: sqlite3.Connection) -> None:
    """Write what is there already, which needs the lock and room on the disk all the same."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {version}")
