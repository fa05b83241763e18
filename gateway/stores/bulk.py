"""Many rows in one statement, for batches in which every row is new.

Each statement gives the interpreter's lock away and waits to get it back from a busy event loop: their
number, not the rows, is what a writer beside a busy loop costs.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.stores.rows import OPENED_COLUMNS, SETTLED_COLUMNS, opened_values, settled_values

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled
    from ctxgate.gateway.stores.rows import Value

MAX_ROWS: Final = 128  # per statement; SQLite takes 32,766 values
_INSERT: Final = (
    f"INSERT INTO attempts ({', '.join(OPENED_COLUMNS)}, incarnation) VALUES {{rows}}"  # noqa: S608  # names
    " ON CONFLICT (attempt_id) DO NOTHING"
)
_ASSIGNED: Final = ", ".join(f"{name} = new.column{n}" for n, name in enumerate(SETTLED_COLUMNS, start=2))
_SETTLE: Final = (
    f"UPDATE attempts SET {_ASSIGNED} FROM (VALUES {{rows}}) AS new"  # noqa: S608  # names
    " WHERE attempt_id = new.column1 AND settled_at_us IS NULL"
)


def insert(connection: sqlite3.Connection, rows: Sequence[AttemptOpened], incarnation: str) -> bool:
    """Insert openings; False, with some of them inserted, where an id was there before."""
    return _execute(connection, _insert_text, [(*opened_values(row), incarnation) for row in rows])


def settle(connection: sqlite3.Connection, rows: Sequence[AttemptSettled]) -> bool:
    """Settle attempts; False, with some of them settled, where one was settled before or never opened."""
    return _execute(connection, _settle_text, [(row.attempt_id, *settled_values(row)) for row in rows])


def _execute(
    connection: sqlite3.Connection, text: Callable[[int], str], rows: Sequence[tuple[Value, ...]]
) -> bool:
    """Run a statement over rows, in powers of two, so that few texts are prepared."""
    start = 0
    while start < len(rows):
        size = min(1 << ((len(rows) - start).bit_length() - 1), MAX_ROWS)
        values = list(chain.from_iterable(rows[start : start + size]))
        if connection.execute(text(size), values).rowcount != size:
            return False
        start += size
    return True


@cache
def _insert_text(rows: int) -> str:
    return _INSERT.format(rows=_places(len(OPENED_COLUMNS) + 1, rows))


@cache
def _settle_text(rows: int) -> str:
    return _SETTLE.format(rows=_places(len(SETTLED_COLUMNS) + 1, rows))


def _places(columns: int, rows: int) -> str:
    return ", ".join([f"({', '.join('?' * columns)})"] * rows)
