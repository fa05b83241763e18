"""How many replicas each pool needs at the present load, as a metric that an autoscaler can follow.

Each process tells of what went through it: with several gateways the figure of a pool is the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from ctxgate.inference.usage import NOTHING_USED
from ctxgate.routing.scale import Arrival, Arrivals, wanted
from ctxgate.routing.snapshot import IDLE

if TYPE_CHECKING:
    from ctxgate.gateway.config import Pool
    from ctxgate.gateway.flow import Settled
    from ctxgate.gateway.services import Services


class Scaling:
    """The load of every pool whose speed is known. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._arrivals: dict[str, Arrivals] = {}
        self._gauge = Gauge(
            "ctxgate_replicas_wanted",
            "Replicas that keep a pool's latency budgets at the load of the last minutes.",
            ["pool"],
            registry=services.telemetry.registry,
        )

    def settled(self, settled: Settled) -> None:
        """Note what an attempt asked of its pool, where anything is known of it."""
        held, usage = settled.answered.held, settled.answered.usage
        pool, prompt = held.routed.pool, usage.prompt
        speed = self._services.speeds.of(pool)
        if speed is None or usage == NOTHING_USED or not prompt:
            return
        new = prompt if usage.uncached.value is None else usage.uncached.value
        ttft_us = held.routed.budget.ttft_us
        self._arrivals.setdefault(pool.name, Arrivals()).add(
            Arrival(
                self._services.fleet.clock(),
                speed.prefill_s(new, prompt),
                usage.output.value or 0,
                prompt,
                None if ttft_us is None else ttft_us / 1e6 - speed.ttft_s(new, prompt, IDLE),
            )
        )

    def wanted(self, pool: Pool) -> int | None:
        """The replicas that a pool needs now; None while its speed or its load is unknown."""
        speed, arrivals = self._services.speeds.of(pool), self._arrivals.get(pool.name)
        if speed is None or arrivals is None:
            return None
        return wanted(arrivals.load(self._services.fleet.clock()), arrivals.slacks, speed)

    def show(self) -> None:
        """Set the metric, for a scrape that comes now."""
        for pool in self._services.config.pools.values():
            number = self.wanted(pool)
            if number is not None:
                self._gauge.labels(pool.name).set(number)
