"""What a starting process does for dead ones: take over their settlements, settle what they left open."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled, Outcome
from ctxgate.gateway.stores.rows import (
    INSERT,
    OPENED_COLUMNS,
    SETTLE,
    opened_from_values,
    opened_values,
    settled_values,
)
from ctxgate.inference.rates import Charge
from ctxgate.inference.usage import NOTHING_KNOWN, UNKNOWN, Usage, estimated

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable

    from ctxgate.gateway.stores.spill import Spilled

    Price: TypeAlias = Callable[[AttemptOpened, Usage], Charge]

CHUNK: Final = 500  # rows per transaction, so that requests are served meanwhile
_OPEN: Final = "FROM attempts WHERE incarnation = ? AND settled_at_us IS NULL"


def open_incarnations(connection: sqlite3.Connection) -> list[str]:
    """The processes that have open attempts."""
    query = "SELECT DISTINCT incarnation FROM attempts WHERE settled_at_us IS NULL ORDER BY incarnation"
    return [str(name) for (name,) in connection.execute(query)]


def settle_crashed(connection: sqlite3.Connection, incarnation: str, price: Price, now_us: int) -> list[str]:
    """Settle up to CHUNK open attempts of a dead process as crashed; returns their ids."""
    query = f"SELECT {', '.join(OPENED_COLUMNS)} {_OPEN} ORDER BY seq LIMIT {CHUNK}"
    found = [opened_from_values(values) for values in connection.execute(query, (incarnation,)).fetchall()]
    for row in found:
        settled = crashed(row, price, now_us)
        connection.execute(SETTLE, (*settled_values(settled), row.attempt_id))
    return [row.attempt_id for row in found]


def crashed(row: AttemptOpened, price: Price, now_us: int) -> AttemptSettled:
    """The settlement of an attempt whose process died: the prompt as estimated, the output unknown."""
    usage = crashed_usage(row)
    return AttemptSettled(
        attempt_id=row.attempt_id,
        outcome=Outcome.CRASHED,
        status=None,
        finish_reason=None,
        ttft_us=None,
        total_us=max(0, now_us - row.opened_at_us),
        settled_at_us=now_us,
        usage=usage,
        charge=_charge(row, usage, price),
    )


def crashed_usage(row: AttemptOpened) -> Usage:
    """The estimated prompt, split by the predicted prefix hit; without a prediction, all of it uncached."""
    prompt = row.estimated_prompt_tokens
    if prompt is None:
        return NOTHING_KNOWN
    cached = min(row.predicted_cached_tokens or 0, prompt)
    return Usage(uncached=estimated(prompt - cached), cached=estimated(cached), output=UNKNOWN)


def _charge(row: AttemptOpened, usage: Usage, price: Price) -> Charge:
    try:
        return price(row, usage)
    except LookupError:  # the pool has left the configuration since: its rates are unknown, not 0
        day = datetime.fromtimestamp(row.opened_at_us / 1e6, UTC).date()
        return Charge(None, None, None, None, exact=False, rates_effective=day)


def apply_spilled(connection: sqlite3.Connection, rows: Iterable[Spilled], incarnation: str) -> list[str]:
    """Write a dead process's spilled settlements; returns the ids that are in no row, nor carry one."""
    missing = []
    for row in rows:
        if row.opened is not None:
            connection.execute(INSERT, (*opened_values(row.opened), incarnation))
        attempt_id = row.settled.attempt_id
        if connection.execute(SETTLE, (*settled_values(row.settled), attempt_id)).rowcount:
            continue
        if not connection.execute("SELECT 1 FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone():
            missing.append(attempt_id)
    return missing
