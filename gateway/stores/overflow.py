"""This process's spill file during an outage: what memory should not hold, written once the store works.

Used by the writer's thread alone.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.stores import spill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ctxgate.gateway.stores.spill import Spilled

log = logging.getLogger(__name__)

CHUNK: Final = 500  # rows per transaction, so that requests are served meanwhile


class Overflow:
    """`waiting` counts the settlements in the file that the database does not have yet."""

    def __init__(self, path: Path, database: Path) -> None:
        self.path = path
        self.waiting = 0
        self._database = database
        self._chunks: Iterator[list[Spilled]] | None = None

    def put(self, rows: Sequence[Spilled]) -> None:
        """Append rows and return once they are on the disk; raises `spill.SpillFailed`."""
        self.rewind()
        kept = len(rows)
        try:
            spill.write(self.path, rows)
        except spill.SpillFailed as failure:
            kept = failure.kept
            raise
        finally:
            self.waiting += kept

    def rewind(self) -> None:
        """Read from the start next time; what is in the database by then changes nothing there."""
        self._chunks = None

    def next_chunk(self) -> list[Spilled]:
        """The next rows to write; none, and the file gone, once all of them are committed."""
        try:
            if self._chunks is None:
                self._chunks = spill.chunks(self.path, CHUNK)
            rows = next(self._chunks, None)
            if rows is None:
                self._finish()
        except (OSError, ValueError):
            log.exception("%s stays where it is; the next start tries again", self.path)
            self.waiting = 0
            self.rewind()
            return []
        return rows or []

    def _finish(self) -> None:
        sync_log(self._database)
        log.warning("%d settlements of the outage are written from %s", self.waiting, self.path)
        self.path.unlink()
        self.waiting = 0
        self.rewind()


def sync_log(database: Path) -> None:
    """Force the write-ahead log to the disk: with synchronous NORMAL, a commit alone does not."""
    descriptor = os.open(database.with_name(f"{database.name}-wal"), os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
