"""What this process knows of every replica: health, open attempts, models served.

Open attempts and their work are counted when a replica is chosen and given back exactly once on every way
out. Nothing else writes to these counts: neither probes nor the breaker.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from ctxgate.compression.rules import ALL_RULES, allowed_rules
from ctxgate.inference.engine_load import EngineLoad
from ctxgate.inference.finding import Finding
from ctxgate.routing import health
from ctxgate.routing.snapshot import Knowledge, ReplicaState, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from ctxgate.compression.rules import Rule
    from ctxgate.gateway.config import Pool, Replica
    from ctxgate.inference.probe import Probe
    from ctxgate.inference.template_facts import Findings
    from ctxgate.routing.prefix_index import Place

LOAD_COUNTS_US: Final = 10_000_000
"""So long counts what a replica told of its load: five readings of metrics; streams of vLLM tell none."""
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
    `started`: how often a probe found it down; what it is afterwards may be another engine. `load`: what
    it last told of its load, of all its clients, and `load_us` when. `draining`: it takes nothing new.

    Its own open attempts: `in_flight` counts them, `prefill_tokens` sums the uncached tokens of those
    without a first token and `prefill_pairs` new (length - new / 2) over them, `decoding` counts the others,
    of which `context_tokens` is the length in all.
    """

    pool: Pool
    replica: Replica
    health: health.Health = field(default_factory=health.Health)
    in_flight: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decoding: int = 0
    context_tokens: int = 0
    reports_cached: bool | None = None
    fingerprint: str | None = None
    windows: Mapping[str, int | None] = field(default_factory=dict)
    findings: dict[str, Findings] = field(default_factory=dict)
    settling_until_us: int = 0
    asked: bool = False
    started: int = 0
    load: EngineLoad | None = None
    load_us: int = 0
    draining: bool = False
    known_work: Work | None = None

    def work(self) -> Work:
        """What it has to do now, made anew only where that changed: every request asks for it."""
        if self.known_work is None:
            self.known_work = self._counted()
        return self.known_work

    def changed(self) -> None:
        """Its counts are others now, or its load."""
        self.known_work = None

    def _counted(self) -> Work:
        load = self.load
        if load is None:
            return Work(self.prefill_tokens, self.decoding, self.context_tokens, self.prefill_pairs)
        return Work(
            self.prefill_tokens,
            self.decoding,
            self.context_tokens,
            self.prefill_pairs,
            load.running,
            load.waiting,
            load.kv_usage,
        )


class Taken:
    """One open attempt: counted at its replica from the block's begin to its end, whatever ends it.

    Until its first token its uncached tokens wait to be computed; then it decodes. It may be a breaker's
    trial. `decodes_after_s`: when to take it for decoding where its answer shows no first token; None: never.
    """

    __slots__ = (
        "_decodes", "_decodes_after_s", "_fleet", "_length", "_new", "_number", "_pairs", "_record", "_timer",
    )  # fmt: skip

    def __init__(
        self, fleet: Fleet, record: ReplicaRecord, new: int, length: int, decodes_after_s: float | None
    ) -> None:
        self._fleet = fleet
        self._record = record
        self._new = new
        self._pairs = new * (2 * length - new) // 2
        self._length = length
        self._decodes_after_s = decodes_after_s
        self._number = 0
        self._decodes: bool | None = None  # None while it is not open
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        fleet, record = self._fleet, self._record
        if self._decodes_after_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._decodes_after_s, self.first_token)
        self._number = fleet.next_number()
        record.health = health.began(record.health, self._number, fleet.clock())
        record.in_flight += 1
        record.prefill_tokens += self._new
        record.prefill_pairs += self._pairs
        record.changed()
        self._decodes = False
        return self

    def first_token(self) -> None:
        """Its prompt has been computed; only the first call counts, and only while it is open."""
        if self._decodes is False:
            self._decodes = True
            record = self._record
            record.prefill_tokens -= self._new
            record.prefill_pairs -= self._pairs
            record.decoding += 1
            record.context_tokens += self._length
            record.changed()

    def __exit__(self, *_: object) -> None:
        record, decodes = self._record, self._decodes
        self._decodes = None
        if self._timer is not None:
            self._timer.cancel()
        record.in_flight -= 1
        if decodes:
            record.decoding -= 1
            record.context_tokens -= self._length
        else:
            record.prefill_tokens -= self._new
            record.prefill_pairs -= self._pairs
        record.changed()
        record.health = health.left(record.health, self._number)


class Fleet:
    """All replicas of all pools. `clock` gives microseconds and never steps back, as the time of day may."""

    def __init__(self, pools: Mapping[str, Pool], clock: Callable[[], int] = steady_us) -> None:
        self.clock = clock
        self._numbers = count(1)
        self._rules: dict[tuple[str, str], frozenset[Rule]] = {}
        self._records: dict[Place, ReplicaRecord] = {}
        self._gone: dict[Place, ReplicaRecord] = {}
        self._by_pool: dict[str, tuple[Pool, tuple[tuple[Place, ReplicaRecord], ...]]] = {}
        self.changed = asyncio.Event()
        """Set once the replicas are others; then there is a new one."""
        self.update(pools)

    def update(self, pools: Mapping[str, Pool]) -> list[Place]:
        """Have these pools from now on; the places that are gone, or are another server now.

        A replica of the same name and address keeps what is known of it. One that is gone is remembered
        while it has open attempts.
        """
        old, self._records = self._records, {}
        for pool in pools.values():
            for replica in pool.replicas:
                place = (pool.name, replica.name)
                known = old.get(place)
                if known is None or _address(known.replica) != _address(replica):
                    known = ReplicaRecord(pool, replica)
                known.pool, known.replica, known.draining = pool, replica, replica.draining
                self._records[place] = known
        gone = {place: record for place, record in old.items() if self._records.get(place) is not record}
        self._gone = {place: record for place, record in self._gone.items() if record.in_flight} | gone
        self._rules = {key: rules for key, rules in self._rules.items() if key[0] in pools}
        self._by_pool = {}
        self.changed.set()
        self.changed = asyncio.Event()
        return list(gone)

    def records(self) -> Iterable[ReplicaRecord]:
        """Every replica's record."""
        return self._records.values()

    def record(self, pool: str, replica: str) -> ReplicaRecord:
        """One replica's record, also of one that is gone and has open attempts."""
        place = (pool, replica)
        return self._records.get(place) or self._gone[place]

    def known(self, pool: str, replica: str) -> ReplicaRecord | None:
        """The record of a replica that is configured; None of one that is gone."""
        return self._records.get((pool, replica))

    def healthy(self, record: ReplicaRecord) -> bool:
        """Whether attempts may go to this replica now."""
        return record.health.healthy(self.clock())

    def snapshot(
        self,
        pools: Iterable[Pool],
        hits: Mapping[Place, int] = MappingProxyType({}),
        told: Container[Place] = (),
        live: Mapping[Place, int] = MappingProxyType({}),
    ) -> list[ReplicaState]:
        """The replicas of some pools as the router sees them.

        `hits`: expected ones, where known; `told`: replicas of which their cache events tell them exactly.
        `live`: the tokens of the conversations there that may go on.
        """
        now_us = self.clock()
        exact, known, cold = Knowledge.EXACT, Knowledge.DEGRADED, Knowledge.COLD
        states: list[ReplicaState] = []
        for place, record in self.present(pools):
            health, load, hit = record.health, record.load, hits.get(place)
            # As `Health.healthy`, but no call where a breaker is closed: for each replica of each request.
            states.append(
                ReplicaState(
                    place[0],
                    place[1],
                    health.healthy(now_us) if health.open_until_us else health.probe_ok,
                    record.in_flight,
                    record.draining,
                    record.known_work or record.work(),
                    None if load is None else load.kv_tokens,
                    hit or 0,
                    cold if hit is None else exact if place in told else known,
                    live.get(place, 0),
                )
            )
        return states

    def present(self, pools: Iterable[Pool]) -> Sequence[tuple[Place, ReplicaRecord]]:
        """The replicas of some pools with their records, but for those that are gone since."""
        found = [self._present(pool) for pool in pools]
        return found[0] if len(found) == 1 else [*chain.from_iterable(found)]

    def _present(self, pool: Pool) -> tuple[tuple[Place, ReplicaRecord], ...]:
        before = self._by_pool.get(pool.name)
        if before is None or before[0] is not pool:
            places = [(pool.name, replica.name) for replica in pool.replicas]
            rows = tuple((place, self._records[place]) for place in places if place in self._records)
            before = self._by_pool[pool.name] = pool, rows
        return before[1]

    def taken(
        self,
        pool: str,
        replica: str,
        *,
        new: int = 0,
        length: int = 0,
        decodes_after_s: float | None = None,
    ) -> Taken:
        """Count one open attempt on a replica for as long as the block runs; see `Taken`.

        Its prompt has `length` tokens, `new` of which the replica must compute.
        """
        return Taken(self, self.record(pool, replica), new, length, decodes_after_s)

    def next_number(self) -> int:
        """A number that no other attempt of this process has."""
        return next(self._numbers)

    def told_load(self, pool: str, replica: str, load: EngineLoad) -> None:
        """Learn what a replica tells of its load; figures that it leaves out stay as they were."""
        record = self.record(pool, replica)
        record.load = load if record.load is None else record.load.updated(load)
        record.load_us = self.clock()
        record.changed()

    def ended(self, pool: str, replica: str, sign: health.Sign, root: bytes) -> None:
        """Learn from how an attempt of the conversation `root` ended."""
        record = self.record(pool, replica)
        record.health = health.ended(record.health, sign, root, self.clock())

    def probed(self, pool: str, replica: str, probe: Probe) -> None:
        """Learn from a probe; windows that it did not tell stay as they were, a load for LOAD_COUNTS_US."""
        record = self.record(pool, replica)
        was_up = record.health.probe_ok
        record.health = health.probed(record.health, probe.finding)
        record.asked |= probe.finding is Finding.WELL
        if was_up and not record.health.probe_ok:
            record.started += 1
            record.load = None  # of an engine that is gone
            record.changed()
        elif record.load is not None and record.load_us + LOAD_COUNTS_US < self.clock():
            record.load = EngineLoad(kv_tokens=record.load.kv_tokens)  # the size of its cache stays
            record.changed()
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


def _address(replica: Replica) -> tuple[object, ...]:
    """Where a server is, and where it tells of its cache."""
    return replica.url, replica.kv_events
