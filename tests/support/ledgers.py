"""Ledger rows for tests, and the registry of stores that the contract tests run on."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled, Outcome
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.rates import Charge
from ctxgate.inference.usage import Usage, measured

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ctxgate.gateway.ledger import Ledger

RATES_DAY: Final = date(2026, 11, 1)
NOON_US: Final = 1_796_040_000_000_000  # 2026-11-30T12:00:00Z
DAY_US: Final = 86_400_000_000


def opened(attempt_id: str = "a1", **changes: object) -> AttemptOpened:
    """An opening row."""
    row = AttemptOpened(
        attempt_id=attempt_id,
        request_id=f"request-{attempt_id}",
        attempt_number=1,
        organisation="acme",
        team="search",
        key_id="key-1",
        task="fix-bug",
        task_source="header",
        surface="chat",
        model="small",
        pool="fast",
        replica="fast-0",
        stream=True,
        body_bytes=4_096,
        opened_at_us=NOON_US,
        predicted_cached_tokens=80,
        estimated_prompt_tokens=100,
    )
    return replace(row, **changes)


def settled(attempt_id: str = "a1", **changes: object) -> AttemptSettled:
    """A settlement: 20 uncached, 80 cached, 7 output tokens for 20 + 8 + 14 nano-dollars."""
    row = AttemptSettled(
        attempt_id=attempt_id,
        outcome=Outcome.COMPLETED,
        status=200,
        finish_reason="stop",
        ttft_us=1_500,
        total_us=9_000,
        settled_at_us=NOON_US + 9_000,
        usage=Usage(measured(20), measured(80), measured(7)),
        charge=Charge(uncached=20, cached=8, output=14, total=42, exact=True, rates_effective=RATES_DAY),
    )
    return replace(row, **changes)


def cost(nano: int | None) -> Charge:
    """A charge of a total, all of it output; None for nothing known."""
    part = None if nano is None else 0
    return Charge(part, part, nano, nano, exact=nano is not None, rates_effective=RATES_DAY)


def price(row: AttemptOpened, usage: Usage) -> Charge:
    """One nano-dollar per uncached token, a tenth per cached one, the output unknown."""
    if usage.uncached.value is None or usage.cached.value is None:
        return cost(None)
    uncached, cached = usage.uncached.value, usage.cached.value // 10
    return Charge(uncached, cached, None, uncached + cached, exact=False, rates_effective=RATES_DAY)


def sqlite(folder: Path) -> Ledger:
    """A ledger on the one SQLite file of a folder; each call is one more gateway process."""
    return SqliteLedger(folder / "ledger.db", price=price)


STORES: Final[dict[str, Callable[[Path], Ledger]]] = {"sqlite": sqlite}
"""By name: opens a ledger on the store of a folder."""


async def write(ledger: Ledger, *rows: tuple[AttemptOpened, AttemptSettled]) -> None:
    futures = [step for before, after in rows for step in (ledger.open(before), ledger.settle(after))]
    assert await asyncio.gather(*futures) == [None, True] * len(rows)
