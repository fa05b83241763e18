"""What this process knows of every replica: health, open attempts, models served.

Open attempts are counted when a replica is chosen and given back exactly once on every way out.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from ctxgate.compression.rules import ALL_RULES, allowed_rules
from ctxgate.inference.finding import Finding
from ctxgate.routing import health
from ctxgate.routing.snapshot import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ctxgate.compression.rules import Rule
    from ctxgate.gateway.config import Pool, Replica
    from ctxgate.inference.probe import Probe
    from ctxgate.inference.template_facts import Findings

_STARTED_AT_NS: Final = time.time_ns() - time.monotonic_ns()


def steady_us() -> int:
    """Microseconds that never step back: the time of day at the process's start, carried on evenly."""
    return (_STARTED_AT_NS + time.monotonic_ns()) // 1000


@dataclass(slots=True)
class ReplicaRecord:
    """The mutable state of one replica.

    `windows`: served model name -> max_model_len (tokens, or None). `reports_cached`: it has told of a
    cache hit, so that leaving the figure out means zero (True), or a probe that must have hit was told no
    figure (False); None while neither is known. `fingerprint`: its `system_fingerprint`. `findings`: what
    a probe found, by served model name. `settling_until_us`: until then it is worth waiting for a probe.
    `asked`: it has been asked for its models, whatever it told.
    `started`: how often a probe found it down; what it is afterwards may be another engine.
    """

    pool: Pool
    replica: Replica
    health: health.Health = field(default_factory=health.Health)
    in_flight: int = 0
    reports_cached: bool | None = None
    fingerprint: str | None = None
    windows: Mapping[str, int | None] = field(default_factory=dict)
    findings: dict[str, Findings] = field(default_factory=dict)
    settling_until_us: int = 0
    asked: bool = False
    started: int = 0


class Fleet:
    """All replicas of all pools. `clock` gives microseconds and never steps back, as the time of day may."""

    def __init__(self, pools: Mapping[str, Pool], clock: Callable[[], int] = steady_us) -> None:
        self.clock = clock
        self._numbers = count(1)
        self._rules: dict[tuple[str, str], frozenset[Rule]] = {}
        self._records = {(p.name, r.name): ReplicaRecord(p, r) for p in pools.values() for r in p.replicas}

    def records(self) -> Iterable[ReplicaRecord]:
        """Every replica's record."""
        return self._records.values()

    def record(self, pool: str, replica: str) -> ReplicaRecord:
        """One replica's record."""
        return self._records[pool, replica]

    def healthy(self, record: ReplicaRecord) -> bool:
        """Whether attempts may go to this replica now."""
        return record.health.healthy(self.clock())

    def snapshot(self, pools: Iterable[Pool]) -> list[ReplicaState]:
        """The replicas of some pools as the router sees them."""
        now_us = self.clock()
        return [
            ReplicaState(pool.name, replica.name, record.health.healthy(now_us), record.in_flight)
            for pool in pools
            for replica in pool.replicas
            for record in (self._records[pool.name, replica.name],)
        ]

    @contextmanager
    def taken(self, pool: str, replica: str) -> Iterator[None]:
        """Count one open attempt on a replica for as long as the block runs; it may be a breaker's trial."""
        record = self._records[pool, replica]
        number = next(self._numbers)
        record.health = health.began(record.health, number, self.clock())
        record.in_flight += 1
        try:
            yield
        finally:
            record.in_flight -= 1
            record.health = health.left(record.health, number)

    def ended(self, pool: str, replica: str, sign: health.Sign, root: bytes) -> None:
        """Learn from how an attempt of the conversation `root` ended."""
        record = self._records[pool, replica]
        record.health = health.ended(record.health, sign, root, self.clock())

    def probed(self, pool: str, replica: str, probe: Probe) -> None:
        """Learn from a probe; windows that it did not tell stay as they were."""
        record = self._records[pool, replica]
        was_up = record.health.probe_ok
        record.health = health.probed(record.health, probe.finding)
        record.asked |= probe.finding is Finding.WELL
        record.started += was_up and not record.health.probe_ok
        if probe.windows:
            record.windows = probe.windows

    def examined(self, record: ReplicaRecord, served_name: str, findings: Findings) -> None:
        """Learn what a probe found out about a replica and one of its models."""
        record.findings[served_name] = findings
        if findings.cache.reports is not None:
            record.reports_cached = findings.cache.reports
        pool = record.pool
        known = [
            allowed_rules(found.facts)
            for replica in pool.replicas
            if (found := self._records[pool.name, replica.name].findings.get(served_name)) is not None
        ]
        self._rules[pool.name, served_name] = ALL_RULES.intersection(*known)

    def rules(self, pool: str, served_name: str) -> frozenset[Rule]:
        """The layout rules that the templates of a pool's replicas all allow; all while nothing is known."""
        return self._rules.get((pool, served_name), ALL_RULES)

    def settled(self) -> bool:
        """Whether no replica's probe is still worth waiting for."""
        now_us = self.clock()
        return all(record.settling_until_us <= now_us for record in self._records.values())

    def window(self, pools: Iterable[Pool], served_name: str) -> int | None:
        """The largest window any replica of these pools reports for a model, or None while unknown."""
        names = {p.name for p in pools}
        known = [
            window
            for (pool, _), record in self._records.items()
            if pool in names and (window := record.windows.get(served_name)) is not None
        ]
        return max(known, default=None)
