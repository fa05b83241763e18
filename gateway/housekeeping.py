"""What the gateway does now and then: it forgets the forms that nobody has used for long."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import LedgerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.gateway.forms import FormStore

EVERY_S: Final = 3600.0
AT_A_TIME: Final = 500  # forms per transaction, so that no request waits behind a long one
_DAY_US: Final = 86_400_000_000

log = logging.getLogger(__name__)


async def forget_forms(store: FormStore, days: int, now_us: Callable[[], int]) -> None:
    """Forget, for as long as the gateway runs, what was not used for `days`. Ends by being cancelled."""
    while True:
        try:
            while await store.forget(now_us() - days * _DAY_US, AT_A_TIME) == AT_A_TIME:
                pass
        except LedgerError as error:
            log.warning("unused forms stay for now: %s", type(error).__name__)
        await asyncio.sleep(EVERY_S)
