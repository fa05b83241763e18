"""First-seen forms in the ledger's SQLite file: written by its writer, read beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.gateway.forms import FRESH_US, RESERVED
from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores.schema import connect_read_only

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from ctxgate.gateway.stores.writer import Writer

Found: TypeAlias = "tuple[bytes, int]"
"""A form's text, and when it was last known to be in use."""

PARAMETERS: Final = 500  # keys per statement, well below what any build of SQLite takes
_INSERT: Final = "INSERT OR IGNORE INTO forms (tenant, key, text, seen_us) VALUES (?, ?, ?, ?)"
_TOUCH: Final = "UPDATE forms SET seen_us = max(seen_us, ?) WHERE tenant = ? AND key = ?"
_FORGET: Final = """
DELETE FROM forms WHERE rowid IN (
    SELECT rowid FROM forms WHERE seen_us < ? AND substr(tenant, 1, 1) <> ? ORDER BY seen_us LIMIT ?
)
"""


class SqliteForms:
    """`FormStore` on the ledger's file. Reads alone never wait for the writer."""

    def __init__(self, path: Path, writer: Writer, *, busy_timeout_s: float) -> None:
        self._path = path
        self._writer = writer
        self._connection = connect_read_only(path, busy_timeout_s=busy_timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms-reader")
        self._closed = False

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        """See `FormStore.claim`."""
        if self._closed:
            raise LedgerClosed(f"{self._path}: closed")
        if claims:
            step = partial(_claim, tenant=tenant, claims=claims, reads=reads, now_us=now_us)
            return await self._writer.join(step)
        query = partial(_read, self._connection, tenant, reads)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, query)
        except sqlite3.Error as error:
            raise LedgerUnavailable(f"{self._path}: {type(error).__name__}: {error}") from error
        if any(seen_us < now_us - FRESH_US for _, seen_us in found.values()):
            # Nobody waits for this: a note that the writer cannot take now is made another day.
            self._writer.call(partial(_touch, tenant=tenant, found=found, now_us=now_us))
        return _texts(found)

    async def forget(self, unused_since_us: int, limit: int) -> int:
        """See `FormStore.forget`."""
        if self._closed:
            raise LedgerClosed(f"{self._path}: closed")
        step = partial(_forget, unused_since_us=unused_since_us, limit=limit)
        return await asyncio.wrap_future(self._writer.call(step))

    def close(self) -> None:
        """End the reading thread and its connection. Blocks; the writer is closed by its owner."""
        self._closed = True
        self._thread.shutdown()
        self._connection.close()


def _claim(
    connection: sqlite3.Connection,
    tenant: str,
    claims: Mapping[bytes, bytes],
    reads: Collection[bytes],
    now_us: int,
) -> dict[bytes, bytes]:
    found = _read(connection, tenant, (*claims, *reads))
    new = {key: text for key, text in claims.items() if key not in found}
    connection.executemany(_INSERT, ((tenant, key, text, now_us) for key, text in new.items()))
    _touch(connection, tenant, found, now_us)
    return _texts(found) | new  # the transaction holds the write lock: nobody else claims them meanwhile


def _touch(connection: sqlite3.Connection, tenant: str, found: Mapping[bytes, Found], now_us: int) -> None:
    """Note that forms are in use; a note of the last day is good enough."""
    stale = [key for key, (_, seen_us) in found.items() if seen_us < now_us - FRESH_US]
    connection.executemany(_TOUCH, ((now_us, tenant, key) for key in stale))


def _forget(connection: sqlite3.Connection, unused_since_us: int, limit: int) -> int:
    return connection.execute(_FORGET, (unused_since_us, RESERVED, limit)).rowcount


def _texts(found: Mapping[bytes, Found]) -> dict[bytes, bytes]:
    return {key: text for key, (text, _) in found.items()}


def _read(connection: sqlite3.Connection, tenant: str, keys: Collection[bytes]) -> dict[bytes, Found]:
    wanted = tuple(keys)
    found: dict[bytes, Found] = {}
    for start in range(0, len(wanted), PARAMETERS):
        part = wanted[start : start + PARAMETERS]
        marks = ", ".join("?" * len(part))
        query = f"SELECT key, text, seen_us FROM forms WHERE tenant = ? AND key IN ({marks})"  # noqa: S608  # marks
        rows = connection.execute(query, (tenant, *part))
        found.update((key, (text, seen_us)) for key, text, seen_us in rows)
    return found
