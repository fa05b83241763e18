"""What the writer's queue carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    import asyncio
    import sqlite3
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future as ThreadFuture

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled


class Open(Record, frozen=True):
    """An opening row to insert."""

    row: AttemptOpened
    future: asyncio.Future[None]


class Settle(Record, frozen=True):
    """A settlement to write."""

    row: AttemptSettled
    future: asyncio.Future[bool]


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run in a transaction of its own."""

    function: Callable[[sqlite3.Connection], object]
    future: ThreadFuture[object]


@dataclass(frozen=True, slots=True)
class Join:
    """A function to run in whatever transaction is next, beside its rows.

    What it raises undoes its own work alone.
    """

    function: Callable[[sqlite3.Connection], dict[bytes, bytes]]
    future: asyncio.Future[dict[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end: nothing comes after it."""


Batched: TypeAlias = Open | Settle | Join
"""What shares a transaction."""

Operation: TypeAlias = Batched | Call


def settled_before_opened(batch: Iterable[Batched]) -> bool:
    """Whether a settlement was queued before the opening of its attempt, which is its caller's defect."""
    settled: set[str] = set()
    for operation in batch:
        if isinstance(operation, Settle):
            settled.add(operation.row.attempt_id)
        elif isinstance(operation, Open) and operation.row.attempt_id in settled:
            return True
    return False
