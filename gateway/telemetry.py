"""Prometheus metrics: children are made once and kept, labels are bounded by the configuration.

A task, a key or a path is never a label: they are unbounded, and live in the ledger.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import Certainty

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import Fleet
    from ctxgate.gateway.flow import Settled
    from ctxgate.gateway.ledger import Ledger
    from ctxgate.gateway.miss import Miss
    from ctxgate.inference.usage import Count
    from ctxgate.routing.prefix_index import Place, PrefixIndex

_TTFT_BUCKETS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOTAL_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_KINDS: Final = ("uncached", "cached", "output", "reasoning")
_FOUND: Final = ("prompt", "available", "captured", "delivered")
_JUDGED: Final = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TIMED_OUT})
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Sum:
    """What a counter's child has to be told at the next scrape: a plain number, which costs no lock."""

    __slots__ = ("_child", "_more")

    def __init__(self, child: Counter) -> None:
        self._child = child
        self._more = 0

    def inc(self, amount: int = 1) -> None:
        """Add to it."""
        self._more += amount

    def tell(self) -> None:
        """Give the counter what has come since the last time."""
        if self._more:
            self._child.inc(self._more)
            self._more = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """The children of one kind of token."""

    measured: Sum
    estimated: Sum
    unknown: Sum
    cost: Sum

    def add(self, count: Count, cost_nano: int | None) -> None:
        """Count tokens by how they are known, and what they cost."""
        if count.value is None:
            self.unknown.inc()
        elif count.certainty is Certainty.MEASURED:
            self.measured.inc(count.value)
        else:
            self.estimated.inc(count.value)
        if cost_nano:
            self.cost.inc(cost_nano)


@dataclass(frozen=True, slots=True)
class _Place:
    """The children of one combination of team, pool and model."""

    outcomes: dict[Outcome, Sum]
    uncached: _Kind
    cached: _Kind
    output: _Kind
    reasoning: _Kind
    ttft: Histogram
    total: Histogram


class Telemetry:
    """Every metric of the gateway, in a registry of its own."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str], _Place] = {}
        self._routed: dict[tuple[str, str], Sum] = {}
        self._found: dict[str, dict[str, Sum]] = {}
        self._requests: dict[tuple[str, int], Sum] = {}
        self._sums: list[Sum] = []
        self.registry = CollectorRegistry()
        self._add_attempts(self.registry)
        self._add_context(self.registry)
        self._add_misses(self.registry)
        self._add_routing(self.registry)
        self._add_state(self.registry)

    def _add_attempts(self, r: CollectorRegistry) -> None:
        """What requests and attempts came to."""
        self.requests = Counter(
            "ctxgate_requests",
            "Client requests by surface and HTTP status.",
            ["surface", "status"],
            registry=r,
        )
        attempt = ["team", "pool", "model", "outcome"]
        self.attempts = Counter("ctxgate_attempts", "Settled attempts by outcome.", attempt, registry=r)
        tokens = ["team", "pool", "model", "kind", "certainty"]
        self.tokens = Counter(
            "ctxgate_tokens", "Tokens by kind (uncached, cached, output, reasoning).", tokens, registry=r
        )
        kind = ["team", "pool", "model", "kind"]
        self.unknown = Counter(
            "ctxgate_unknown_usage", "Attempts whose tokens of a kind are unknown.", kind, registry=r
        )
        self.cost = Counter(
            "ctxgate_cost_nano_dollars", "Cost in nano-dollars by kind of token.", kind, registry=r
        )
        place = ["pool", "model"]
        self.ttft = Histogram(
            "ctxgate_ttft_seconds",
            "Time to the first streamed token, as seen by the gateway.",
            place,
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.total = Histogram(
            "ctxgate_attempt_seconds", "Duration of an attempt.", place, buckets=_TOTAL_BUCKETS, registry=r
        )
        self.truncated = Counter(
            "ctxgate_stream_truncated", "Answers whose upstream broke off.", ["pool"], registry=r
        )
        self.anomalies = Counter(
            "ctxgate_usage_anomalies",
            "Usage records that contradict themselves.",
            ["pool", "anomaly"],
            registry=r,
        )
        self.plan_failures = Counter(
            "ctxgate_plan_failures", "Prompts forwarded as they came because planning failed.", registry=r
        )
        self.layout_dropped = Counter(
            "ctxgate_layout_dropped",
            "Prompts forwarded as they came because their layout could not be used.",
            ["reason"],
            registry=r,
        )

    def _add_context(self, r: CollectorRegistry) -> None:
        """What became of long conversations."""
        self.compactions = Counter(
            "ctxgate_compactions",
            "Compactions of conversations, by why and by whom.",
            ["reason", "by"],
            registry=r,
        )
        self.compacted_messages = Counter(
            "ctxgate_compacted_messages", "Messages that compactions left out or shortened.", registry=r
        )
        self.context_dropped = Counter(
            "ctxgate_context_dropped",
            "Prompts and compactions that could not be used or kept, by why.",
            ["reason"],
            registry=r,
        )
        self.compaction_off = Counter(
            "ctxgate_compaction_off",
            "Kinds of conversations whose compaction for money was switched off because it lost money.",
            ["team"],
            registry=r,
        )
        self.arrival_bytes = Counter(
            "ctxgate_arrival_bytes",
            "Bytes of tool results that were shortened on arrival: as they came, and how many were saved.",
            ["part"],
            registry=r,
        )
        self.recalls = Counter(
            "ctxgate_recalls",
            "Searches in what had left a prompt, by what came of them.",
            ["outcome"],
            registry=r,
        )
        self.recall_tool = Counter(
            "ctxgate_recall_tool_calls",
            "Calls of the tool context_recall, by what became of them.",
            ["outcome"],
            registry=r,
        )
        self.summary_fallbacks = Counter(
            "ctxgate_summary_fallbacks", "Summaries that did not go as asked, by kind.", ["kind"], registry=r
        )

    def _add_misses(self, r: CollectorRegistry) -> None:
        """What could have been read from the cache and was not."""
        where = ["pool", "cause"]
        self.misses = Counter(
            "ctxgate_cache_misses", "Attempts that missed the prefix cache, by cause.", where, registry=r
        )
        self.avoidable_tokens = Counter(
            "ctxgate_avoidable_tokens", "Prompt tokens computed for want of a hit.", where, registry=r
        )
        self.avoidable_cost = Counter(
            "ctxgate_avoidable_nano_dollars", "What they cost more than cached ones.", where, registry=r
        )
        self.unexplained = Counter(
            "ctxgate_explain_failures", "Prompts whose misses could not be explained.", registry=r
        )

    def _add_routing(self, r: CollectorRegistry) -> None:
        """Where attempts went, and what came of what was predicted of them."""
        self.decisions = Counter(
            "ctxgate_routing_decisions",
            "Replicas chosen, by pool and the reason.",
            ["pool", "reason"],
            registry=r,
        )
        self.budgets = Counter(
            "ctxgate_latency_budgets",
            "Answers with a latency budget, by whether they kept it.",
            ["pool", "class", "kept"],
            registry=r,
        )
        self.switches = Counter(
            "ctxgate_replica_switches",
            "Conversations that went to another replica than before, by the pool they went to.",
            ["pool"],
            registry=r,
        )
        self.routing_failures = Counter(
            "ctxgate_routing_failures",
            "Replicas chosen by the conversation alone because weighing them failed.",
            registry=r,
        )
        self.prefix_tokens = Counter(
            "ctxgate_prefix_tokens",
            "Prompt tokens of the same attempts: all (prompt), expected in the cache of the warmest replica "
            "(available), in that of the chosen one (captured), and read from it (delivered).",
            ["model", "kind"],
            registry=r,
        )

    def routed(self, pool: str, reason: str) -> None:
        """Count one choice of a replica."""
        counter = self._routed.get((pool, reason))
        if counter is None:
            counter = self._routed[pool, reason] = self._sum(self.decisions.labels(pool, reason))
        counter.inc()

    def placed(self, settled: Settled, total_us: int) -> None:
        """Compare one settled attempt with what was expected of it when its replica was chosen."""
        answered = settled.answered
        routed, attempt = answered.held.routed, answered.held.attempt
        kept = routed.budget.kept(answered.ttft_us, total_us) if routed.budget.bounds else None
        if kept is not None and answered.outcome in _JUDGED:
            word = "yes" if kept and answered.outcome is Outcome.COMPLETED else "no"
            self.budgets.labels(attempt.pool, attempt.job_class or "", word).inc()
        usage = answered.usage
        cached, prompt = usage.cached, usage.prompt
        if routed.planned.seen is None or cached.certainty is not Certainty.MEASURED or not prompt:
            return
        found = self._found.get(attempt.model)
        if found is None:
            found = {kind: self._sum(self.prefix_tokens.labels(attempt.model, kind)) for kind in _FOUND}
            self._found[attempt.model] = found
        captured = 0 if routed.expected is None else routed.expected.tokens
        found["prompt"].inc(prompt)
        found["available"].inc(min(max(routed.available_tokens or 0, captured), prompt))
        found["captured"].inc(min(captured, prompt))
        found["delivered"].inc(cached.value or 0)

    def _add_state(self, r: CollectorRegistry) -> None:
        """How things stand now."""
        replica = ["pool", "replica"]
        self.in_flight = Gauge("ctxgate_in_flight", "Open attempts on a replica.", replica, registry=r)
        self.healthy = Gauge(
            "ctxgate_replica_healthy", "1 while a replica may be chosen.", replica, registry=r
        )
        self.reports_cached = Gauge(
            "ctxgate_replica_reports_cached",
            "1 where a replica reports cached tokens, 0 where a probe found that it does not.",
            replica,
            registry=r,
        )
        self.believed = Gauge(
            "ctxgate_replica_hits_believed",
            "0 where the hits that a replica reports cannot be its own cache's.",
            replica,
            registry=r,
        )
        self.prefix_links = Gauge("ctxgate_prefix_links", "Links of prompts remembered.", registry=r)
        self.prefix_bytes = Gauge("ctxgate_prefix_bytes", "About the memory they take.", registry=r)
        self.generation = Gauge(
            "ctxgate_config_generation", "How often a configuration was taken over.", registry=r
        )
        self.reloads = Counter(
            "ctxgate_config_reloads", "Configurations read again, by outcome.", ["outcome"], registry=r
        )
        self.clients = Gauge("ctxgate_open_requests", "Client requests being served.", registry=r)
        self.ledger_pending = Gauge("ctxgate_ledger_pending", "Ledger steps not yet durable.", registry=r)

    def forget(self, place: Place) -> None:
        """Show nothing more of a replica that is gone."""
        for gauge in (self.in_flight, self.healthy, self.reports_cached, self.believed):
            with suppress(KeyError):  # nothing was shown of it
                gauge.remove(*place)

    def request(self, surface: str, status: int) -> None:
        """Count one client request; status 0 means that the client left before an answer."""
        counted = self._requests.get((surface, status))
        if counted is None:
            child = self.requests.labels(surface, str(status) if status else "none")
            counted = self._requests[surface, status] = self._sum(child)
        counted.inc()

    def observe(self, fleet: Fleet, ledger: Ledger, index: PrefixIndex) -> None:
        """Set the gauges that mirror state kept elsewhere; on the event loop, before an exposition."""
        for record in fleet.records():
            where = (record.pool.name, record.replica.name)
            self.in_flight.labels(*where).set(record.in_flight)
            self.healthy.labels(*where).set(fleet.healthy(record))
            self.believed.labels(*where).set(index.trusts(where))
            if record.reports_cached is not None:
                self.reports_cached.labels(*where).set(record.reports_cached)
        self.ledger_pending.set(ledger.pending)
        self.prefix_links.set(index.links)
        self.prefix_bytes.set(index.size_bytes)
        self.tell()

    def settled(self, settled: Settled, total_us: int) -> None:
        """Count one settled attempt."""
        answered = settled.answered
        attempt = answered.held.attempt
        where = self._place(attempt.team, attempt.pool, attempt.model)
        where.outcomes[answered.outcome].inc()
        usage, charge = answered.usage, settled.charge
        where.uncached.add(usage.uncached, charge.uncached)
        where.cached.add(usage.cached, charge.cached)
        where.output.add(usage.output, charge.output)
        if usage.reasoning.value:
            where.reasoning.add(usage.reasoning, None)
        if settled.miss is not None:
            self._missed(attempt.pool, settled.miss)
        if answered.ttft_us is not None:
            where.ttft.observe(answered.ttft_us / 1e6)
        where.total.observe(total_us / 1e6)

    def _missed(self, pool: str, miss: Miss) -> None:
        labels = (pool, miss.cause.value)
        self.misses.labels(*labels).inc()
        if miss.avoidable_tokens is not None:
            self.avoidable_tokens.labels(*labels).inc(miss.avoidable_tokens)
        if miss.avoidable_nano is not None:
            self.avoidable_cost.labels(*labels).inc(miss.avoidable_nano)

    def _place(self, team: str, pool: str, model: str) -> _Place:
        """The children of one combination of team, pool and model, made at its first attempt and kept."""
        place = self._places.get((team, pool, model))
        if place is None:
            labels = (team, pool, model)
            place = _Place(
                outcomes={
                    outcome: self._sum(self.attempts.labels(*labels, outcome.value)) for outcome in Outcome
                },
                ttft=self.ttft.labels(pool, model),
                total=self.total.labels(pool, model),
                **{kind: self._kind(labels, kind) for kind in _KINDS},
            )
            self._places[team, pool, model] = place
        return place

    def _kind(self, labels: tuple[str, str, str], kind: str) -> _Kind:
        return _Kind(
            measured=self._sum(self.tokens.labels(*labels, kind, Certainty.MEASURED.value)),
            estimated=self._sum(self.tokens.labels(*labels, kind, Certainty.ESTIMATED.value)),
            unknown=self._sum(self.unknown.labels(*labels, kind)),
            cost=self._sum(self.cost.labels(*labels, kind)),
        )

    def tell(self) -> None:
        """Give every counter what has come since the last time; on the event loop."""
        for kept in self._sums:
            kept.tell()

    def _sum(self, child: Counter) -> Sum:
        kept = Sum(child)
        self._sums.append(kept)
        return kept

    def exposition(self) -> bytes:
        """The text a scraper reads."""
        return generate_latest(self.registry)
