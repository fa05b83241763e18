"""The composition root: the one place where the working parts are made, put together and ended in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from ctxgate.gateway.cache_salt import SECRET_BYTES, Salts, kept_secret
from ctxgate.gateway.context import ContextStage
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.hosted import serve_hosted
from ctxgate.gateway.housekeeping import expire_originals, forget_forms
from ctxgate.gateway.instants import day_of
from ctxgate.gateway.layout import LayoutStage
from ctxgate.gateway.recall import Recall
from ctxgate.gateway.recall_process import RecallProcess, command
from ctxgate.gateway.services import Services, unix_us
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.gateway.telemetry import Telemetry
from ctxgate.inference import rates
from ctxgate.inference.providers import AnyClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ctxgate.gateway.config import Config
    from ctxgate.gateway.keys import KeyRing
    from ctxgate.gateway.ledger import AttemptOpened
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage

log = logging.getLogger(__name__)


@asynccontextmanager
async def assembled(config: Config, keys: KeyRing) -> AsyncIterator[Services]:
    """The working parts; what a dead process left open is settled first.

    At the end everything in the background is waited for. Raises what the store raises: LedgerError,
    sqlite3.Error or OSError.
    """
    ledger = SqliteLedger(config.store, price=partial(_price, config))
    crashed = list(await ledger.recover())
    if crashed:
        log.warning("settled %d attempts that a dead gateway process had left open", len(crashed))
    secret = config.cache_salt_secret
    if secret is None:
        secret = await kept_secret(ledger.forms, secrets.token_bytes(SECRET_BYTES), unix_us())
    client = AnyClient(config.limits.connect_timeout_s)
    serve_hosted(client, config)
    telemetry = Telemetry()
    forms = Forms(ledger.forms)
    layout = LayoutStage(forms, lambda reason: telemetry.layout_dropped.labels(reason).inc())
    process = RecallProcess(command(config.recall_model))  # nothing runs before it is needed
    recall = Recall(ledger.archive, process, lambda outcome: telemetry.recalls.labels(outcome).inc())
    services = Services(
        config,
        keys,
        ledger,
        client,
        Fleet(config.pools),
        telemetry,
        layout,
        Salts(secret),
        forms,
        ledger.archive,
        recall,
    )
    services.context = ContextStage(services)
    housekeeping = asyncio.gather(
        forget_forms(ledger.forms, config.forms_days, unix_us),
        expire_originals(ledger.archive, config.archive_days, unix_us),
    )
    try:
        yield services
    finally:
        housekeeping.cancel()
        await asyncio.gather(housekeeping, return_exceptions=True)
        await services.context.close()
        await asyncio.gather(*services.background, return_exceptions=True)
        await recall.close()
        await client.close()
        await ledger.close()


def _price(config: Config, attempt: AttemptOpened, usage: Usage) -> Charge:
    """The price of an attempt found open after a crash, at the rates of the day it was opened."""
    day = day_of(attempt.opened_at_us)
    return rates.charge(usage, config.pools[attempt.pool].rates, day)
