"""What this process knows of every replica: health, open attempts, models served.

Open attempts are counted when a replica is chosen and given back exactly once on every way out.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxgate.gateway.ledger import Outcome
from ctxgate.routing import health
from ctxgate.routing.choose import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ctxgate.gateway.config import Pool, Replica

_FAILURES = frozenset({Outcome.UPSTREAM_ERROR, Outcome.TRUNCATED, Outcome.UNREACHABLE})
_SUCCESSES = frozenset({Outcome.COMPLETED, Outcome.REJECTED})


@dataclass(slots=True)
class ReplicaRecord:
    """The mutable state of one replica.

    `windows`: served model name -> max_model_len (tokens, or None). `reports_cached`: it has told of a
    cache hit, so that leaving the figure out means zero. `fingerprint`: its `system_fingerprint`.
    """

    pool: Pool
    replica: Replica
    health: health.Health = field(default_factory=health.Health)
    in_flight: int = 0
    reports_cached: bool = False
    fingerprint: str | None = None
    windows: Mapping[str, int | None] = field(default_factory=dict)


class Fleet:
    """All replicas of all pools."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._records = {(p.name, r.name): ReplicaRecord(p, r) for p in pools.values() for r in p.replicas}

    def records(self) -> Iterable[ReplicaRecord]:
        """Every replica's record."""
        return self._records.values()

    def record(self, pool: str, replica: str) -> ReplicaRecord:
        """One replica's record."""
        return self._records[pool, replica]

    def snapshot(self, pools: Iterable[Pool], now_us: int) -> list[ReplicaState]:
        """The replicas of some pools as the router sees them."""
        return [
            ReplicaState(pool.name, replica.name, record.health.healthy(now_us), record.in_flight)
            for pool in pools
            for replica in pool.replicas
            for record in (self._records[pool.name, replica.name],)
        ]

    @contextmanager
    def taken(self, pool: str, replica: str) -> Iterator[None]:
        """Count one open attempt on a replica for as long as the block runs."""
        record = self._records[pool, replica]
        record.in_flight += 1
        try:
            yield
        finally:
            record.in_flight -= 1

    def ended(self, pool: str, replica: str, outcome: Outcome, now_us: int) -> None:
        """Learn from how an attempt ended."""
        record = self._records[pool, replica]
        if outcome in _SUCCESSES:
            record.health = health.succeeded(record.health)
        elif outcome in _FAILURES:
            record.health = health.failed(record.health, now_us)

    def probed(self, pool: str, replica: str, *, ok: bool, windows: Mapping[str, int | None]) -> None:
        """Learn from a probe."""
        record = self._records[pool, replica]
        record.health = health.probed(record.health, ok)
        if ok:
            record.windows = windows

    def window(self, pools: Iterable[Pool], served_name: str) -> int | None:
        """The largest window any replica of these pools reports for a model, or None while unknown."""
        names = {p.name for p in pools}
        known = [
            window
            for (pool, _), record in self._records.items()
            if pool in names and (window := record.windows.get(served_name)) is not None
        ]
        return max(known, default=None)
