"""The archives that the tests of the contract run on."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import price

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ctxgate.gateway.archive import Archive


@asynccontextmanager
async def _sqlite(folder: Path) -> AsyncIterator[Archive]:
    ledger = SqliteLedger(folder / "ledger.db", price=price)
    try:
        yield ledger.archive
    finally:
        await ledger.close()


ARCHIVES: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[Archive]]]] = {"sqlite": _sqlite}
"""By name: opens one more gateway process on the archive of a folder."""
