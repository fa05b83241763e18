"""Every ledger store, for the tests of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.ledgers import STORES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ctxgate.gateway.ledger import Ledger


@pytest.fixture(params=STORES)
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Ledger]:
    """Open one more ledger on the same store."""
    store = STORES[request.param]
    return lambda: store(tmp_path)


@pytest.fixture
async def ledger(open_ledger: Callable[[], Ledger]) -> AsyncIterator[Ledger]:
    yield (ledger := open_ledger())
    await ledger.close()
