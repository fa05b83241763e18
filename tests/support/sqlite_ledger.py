"""How tests get in the way of a SQLite ledger."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ctxgate.gateway.stores.sqlite import SqliteLedger


class Locked:
    """Another process's write transaction, held from `with` to its end."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


def hold(ledger: SqliteLedger) -> Callable[[], None]:
    """Stop the writer thread until the returned function is called."""
    gate = threading.Event()
    ledger._writer.call(lambda _: gate.wait())
    return gate.set


async def failed_again(ledger: SqliteLedger) -> None:
    """Return once the writer has failed one more time than now."""
    before = ledger.failures
    while ledger.failures == before:  # noqa: ASYNC110  # the writer is a thread and knows no event
        await asyncio.sleep(0)
