"""The archive in the ledger's SQLite file: compressed, written by its writer, read beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import zstandard

from ctxgate.gateway.archive import ID_LENGTH, Deleted, Original
from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores.schema import connect_read_only

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.stores.writer import Writer

T = TypeVar("T")
Packed: TypeAlias = "tuple[str, bytes, int]"
"""An original's id, its compressed bytes, and the length of those that came."""

AT_A_TIME: Final = 512 * 2**10  # compressed bytes per transaction, so that no settlement waits long
_LEVEL: Final = 3
_KEEP: Final = """
INSERT INTO archive (tenant, id, body, size, kept_us) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (tenant, id) DO UPDATE SET kept_us = max(kept_us, excluded.kept_us)
"""
_USE: Final = "INSERT OR IGNORE INTO archive_uses (tenant, task, conversation, id) VALUES (?, ?, ?, ?)"
_GET: Final = "SELECT body, size FROM archive WHERE tenant = ? AND id = ?"
_OF_CONVERSATION: Final = """
SELECT id, body, size FROM archive JOIN (
    SELECT id, min(seq) AS seq FROM archive_uses WHERE tenant = ?1 AND conversation = ?2 GROUP BY id
) USING (id) WHERE tenant = ?1 ORDER BY seq
"""
_OF_TASK: Final = f"""
SELECT count(DISTINCT id) FROM archive_uses WHERE tenant = ? AND task = ? AND length(id) = {ID_LENGTH}
"""  # noqa: S608 - a constant
_FORM: Final = "form "  # begins the ids of rows whose bodies are keys of the form store
_FORMS_OF_TASK: Final = """
SELECT body FROM archive WHERE tenant = ?1 AND substr(id, 1, 5) = 'form ' AND id IN (
    SELECT id FROM archive_uses WHERE tenant = ?1 AND task = ?2
) AND NOT EXISTS (
    SELECT 1 FROM archive_uses AS other WHERE other.tenant = ?1 AND other.id = archive.id AND other.task <> ?2
)
"""
_WIPE: Final = "UPDATE forms SET text = x'' WHERE tenant = ? AND key = ?"
_DELETED: Final = "SELECT kept_us FROM archive WHERE tenant = ? AND id = ?"
_DELETE_UNSHARED: Final = """
DELETE FROM archive WHERE tenant = ?1 AND id IN (
    SELECT id FROM archive_uses WHERE tenant = ?1 AND task = ?2
) AND NOT EXISTS (
    SELECT 1 FROM archive_uses AS other WHERE other.tenant = ?1 AND other.id = archive.id AND other.task <> ?2
)
"""
_DELETE_USES: Final = "DELETE FROM archive_uses WHERE tenant = ? AND task = ?"
_EXPIRED: Final = """
SELECT tenant, id FROM archive WHERE kept_us < ? AND NOT (substr(id, 1, 5) = 'form ' AND EXISTS (
    SELECT 1 FROM forms WHERE forms.tenant = archive.tenant AND forms.key = archive.body
)) ORDER BY kept_us LIMIT ?
"""


class SqliteArchive:
    """`Archive` on the ledger's file. Reads never wait for the writer."""

    def __init__(self, path: Path, writer: Writer, *, busy_timeout_s: float) -> None:
        self._path = path
        self._writer = writer
        self._connection = connect_read_only(path, busy_timeout_s=busy_timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._closed = False

    async def keep(
        self,
        tenant: str,
        task: str,
        items: Mapping[str, bytes],
        now_us: int,
        conversation: bytes = b"",
        *,
        forms: Collection[bytes] = (),
        since_us: int | None = None,
    ) -> bool:
        """See `Archive.keep`."""
        self._refuse_if_closed()
        held = partial(_hold, tenant=tenant, task=task, forms=forms, now_us=now_us, since_us=since_us)
        if forms and not await self._written(held):
            return False
        packed = await asyncio.to_thread(_packed, items)
        for part in _parts(packed):
            step = partial(
                _keep,
                tenant=tenant,
                task=task,
                conversation=conversation,
                items=part,
                now_us=now_us,
                since_us=since_us,
            )
            if not await self._written(step):
                return False
        return True

    async def get(self, tenant: str, id_: str) -> bytes | None:
        """See `Archive.get`."""
        rows = await self._read(partial(_rows, self._connection, _GET, (tenant, id_)))
        return rows[0][-1] if rows else None

    async def of_conversation(self, tenant: str, conversation: bytes) -> list[Original]:
        """See `Archive.of_conversation`."""
        if not conversation:
            return []
        query = partial(_rows, self._connection, _OF_CONVERSATION, (tenant, conversation))
        return [Original(id_, body) for id_, body in await self._read(query)]

    async def delete(self, tenant: str, task: str, now_us: int) -> Deleted:
        """See `Archive.delete`."""
        return await self._written(partial(_delete, tenant=tenant, task=task, now_us=now_us))

    async def expire(self, kept_before_us: int, limit: int) -> int:
        """See `Archive.expire`."""
        return await self._written(partial(_expire, kept_before_us=kept_before_us, limit=limit))

    def close(self) -> None:
        """End the reading thread and its connection. Blocks; the writer is closed by its owner."""
        self._closed = True
        self._thread.shutdown()
        self._connection.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LedgerClosed(f"{self._path}: closed")

    async def _written(self, step: Callable[[sqlite3.Connection], T]) -> T:
        self._refuse_if_closed()
        try:
            return await asyncio.wrap_future(self._writer.call(step))
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def _read(self, query: Callable[[], T]) -> T:
        self._refuse_if_closed()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, query)
        except (sqlite3.Error, zstandard.ZstdError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> LedgerUnavailable:
        return LedgerUnavailable(f"{self._path}: {type(error).__name__}: {error}")


def _packed(items: Mapping[str, bytes]) -> list[Packed]:
    compressor = zstandard.ZstdCompressor(_LEVEL)
    return [(id_, compressor.compress(body), len(body)) for id_, body in items.items()]


def _parts(packed: Sequence[Packed]) -> Iterator[list[Packed]]:
    part: list[Packed] = []
    size = 0
    for each in packed:
        if part and size + len(each[1]) > AT_A_TIME:
            yield part
            part, size = [], 0
        part.append(each)
        size += len(each[1])
    if part:
        yield part


def _keep(
    connection: sqlite3.Connection,
    *,
    tenant: str,
    task: str,
    conversation: bytes,
    items: Sequence[Packed],
    now_us: int,
    since_us: int | None,
) -> bool:
    if _was_deleted(connection, tenant, task, since_us):
        return False
    connection.executemany(_KEEP, ((tenant, id_, body, size, now_us) for id_, body, size in items))
    connection.executemany(_USE, ((tenant, task, conversation, id_) for id_, _, _ in items))
    return True


def _hold(
    connection: sqlite3.Connection,
    *,
    tenant: str,
    task: str,
    forms: Collection[bytes],
    now_us: int,
    since_us: int | None,
) -> bool:
    """Note whose forms these are. Where the task was deleted meanwhile, their texts go too."""
    named = [(f"{_FORM}{key.hex()}", key) for key in forms]
    if _was_deleted(connection, tenant, task, since_us):
        connection.executemany(_WIPE, ((tenant, key) for _, key in named))
        return False
    connection.executemany(_KEEP, ((tenant, id_, key, 0, now_us) for id_, key in named))
    connection.executemany(_USE, ((tenant, task, b"", id_) for id_, _ in named))
    return True


def _was_deleted(connection: sqlite3.Connection, tenant: str, task: str, since_us: int | None) -> bool:
    if since_us is None:
        return False
    row = connection.execute(_DELETED, (tenant, _deletion_of(task))).fetchone()
    return row is not None and row[0] >= since_us


def _deletion_of(task: str) -> str:
    """The id of the row that says when a task was deleted; it goes as originals of that time do."""
    return f"deleted {blake2b(task.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def _rows(connection: sqlite3.Connection, query: str, values: tuple[object, ...]) -> list[tuple[str, bytes]]:
    """Whatever precedes an original in each row, and the original."""
    decompressor = zstandard.ZstdDecompressor()
    rows = connection.execute(query, values).fetchall()
    return [
        ("".join(before), decompressor.decompress(body, max_output_size=size)) for *before, body, size in rows
    ]


def _delete(connection: sqlite3.Connection, *, tenant: str, task: str, now_us: int) -> Deleted:
    count: int = connection.execute(_OF_TASK, (tenant, task)).fetchone()[0]
    forms = tuple(key for (key,) in connection.execute(_FORMS_OF_TASK, (tenant, task)))
    connection.executemany(_WIPE, ((tenant, key) for key in forms))
    connection.execute(_DELETE_UNSHARED, (tenant, task))
    connection.execute(_DELETE_USES, (tenant, task))
    connection.execute(_KEEP, (tenant, _deletion_of(task), b"", 0, now_us))
    return Deleted(count, forms)


def _expire(connection: sqlite3.Connection, *, kept_before_us: int, limit: int) -> int:
    expired = connection.execute(_EXPIRED, (kept_before_us, limit)).fetchall()
    connection.executemany("DELETE FROM archive WHERE tenant = ? AND id = ?", expired)
    connection.executemany("DELETE FROM archive_uses WHERE tenant = ? AND id = ?", expired)
    return len(expired)
