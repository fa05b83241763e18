"""Moving the write-ahead log into the database file, beside the writer instead of within its commits.

SQLite checkpoints inside whichever commit fills the log, and two fsyncs there would hold back every
request that waits for it. A passive checkpoint on a connection of its own blocks neither readers nor
the writer. The writer's connection keeps a far higher limit, for a log that outruns this thread.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from ctxgate.gateway.stores.watch import FileWatch

log = logging.getLogger(__name__)

EVERY: Final = 1_000  # operations between two checkpoints: a log of a few MB
WATCH_EVERY_S: Final = 1.0


class Checkpointer:
    """A thread that checkpoints after every so many operations, and watches the file meanwhile."""

    def __init__(self, path: Path, *, watch: FileWatch, every: int = EVERY) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._watch = watch
        self._every = every
        self._since_last = 0
        self._due = False
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-checkpointer", daemon=True)
        self._thread.start()

    def count(self, operations: int) -> None:
        """Tell of committed operations. Called by the writer's thread alone."""
        self._since_last += operations
        if self._since_last >= self._every:
            self._since_last = 0
            self._due = True
            self._wake.set()

    def stop(self) -> None:
        """End the thread and close its connection. Blocks for a checkpoint that is due."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            self._wake.wait(WATCH_EVERY_S)
            self._wake.clear()
            self._watch.check()
            if self._due:
                self._due = False
                self._checkpoint()
            if self._stopping:
                return

    def _checkpoint(self) -> None:
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:  # the log keeps what it holds, and the next one tries again
            log.warning("the ledger's log could not be checkpointed: %s", error)
