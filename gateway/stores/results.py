"""Results of ledger operations, on their way from the writer's thread to whoever waits on the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ctxgate.gateway.ledger import LedgerUnavailable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

Result: TypeAlias = bool | dict[bytes, bytes] | Exception | None
"""None for an opening, bool for a settlement, a mapping for what joined them; or why there is none."""

Waiting: TypeAlias = "asyncio.Future[Any]"


def deliver(results: Iterable[tuple[Waiting, Result]]) -> None:
    """Give each result to its future, on the event loop."""
    for future, result in results:
        if future.done():  # cancelled by its waiter
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
            future.exception()  # the ledger logs it, and not every attempt waits to hear of it
        else:
            future.set_result(result)


def unavailable(error: Exception) -> LedgerUnavailable:
    """A store's error as the ledger's."""
    refusal = LedgerUnavailable(f"{type(error).__name__}: {error}")
    refusal.__cause__ = error
    return refusal
