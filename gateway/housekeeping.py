"""What the gateway does now and then: it forgets unused forms and old originals, some days later."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import LedgerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.gateway.archive import Archive
    from ctxgate.gateway.forms import FormStore

EVERY_S: Final = 3600.0
AT_A_TIME: Final = 500  # rows per transaction, so that no request waits behind a long one
_DAY_US: Final = 86_400_000_000

log = logging.getLogger(__name__)


async def forget_forms(store: FormStore, days: int, now_us: Callable[[], int]) -> None:
    """Forget, for as long as the gateway runs, what was not used for `days`. Ends by being cancelled."""
    await _hourly(store.forget, days, now_us, "unused forms stay for now: %s")


async def expire_originals(archive: Archive, days: int, now_us: Callable[[], int]) -> None:
    """Delete, for as long as the gateway runs, what was archived `days` ago. Ends by being cancelled."""
    await _hourly(archive.expire, days, now_us, "expired originals stay for now: %s")


async def _hourly(
    drop: Callable[[int, int], Awaitable[int]], days: int, now_us: Callable[[], int], failed: str
) -> None:
    while True:
        try:
            while await drop(now_us() - days * _DAY_US, AT_A_TIME) == AT_A_TIME:
                pass
        except LedgerError as error:
            log.warning(failed, type(error).__name__)
        await asyncio.sleep(EVERY_S)
