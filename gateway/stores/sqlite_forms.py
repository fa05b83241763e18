"""First-seen forms in the ledger's SQLite file: written by its writer, read beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores.schema import connect_read_only

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from ctxgate.gateway.stores.writer import Writer

PARAMETERS: Final = 500  # keys per statement, well below what any build of SQLite takes
_INSERT: Final = "INSERT OR IGNORE INTO forms (tenant, key, text, seen_us) VALUES (?, ?, ?, ?)"


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
            return await asyncio.get_running_loop().run_in_executor(self._thread, query)
        except sqlite3.Error as error:
            raise LedgerUnavailable(f"{self._path}: {type(error).__name__}: {error}") from error

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
    return found | new  # the transaction holds the write lock: nobody else has claimed them meanwhile


def _read(connection: sqlite3.Connection, tenant: str, keys: Collection[bytes]) -> dict[bytes, bytes]:
    wanted = tuple(keys)
    found: dict[bytes, bytes] = {}
    for start in range(0, len(wanted), PARAMETERS):
        part = wanted[start : start + PARAMETERS]
        marks = ", ".join("?" * len(part))
        query = f"SELECT key, text FROM forms WHERE tenant = ? AND key IN ({marks})"  # noqa: S608  # marks
        found.update(connection.execute(query, (tenant, *part)))
    return found
