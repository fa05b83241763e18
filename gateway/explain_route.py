"""Where a request would go, with what is predicted of it at every replica; in prose and as JSON. Pure.

All replicas are taken to be up and idle, and the caches cold, but for what an earlier request left.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ctxgate.inference.rates import format_usd, rates_at
from ctxgate.routing.choose import choose
from ctxgate.routing.snapshot import Demand, PoolTerms, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import date

    from ctxgate.gateway.config import Config, Model, Pool
    from ctxgate.routing.candidates import Candidate, RouteDecision
    from ctxgate.routing.prefix_index import Place
    from ctxgate.routing.snapshot import LatencyBudget, Speed

_HEAD = ("pool", "replica", "cached", "first token", "last token", "dollars", "in time", "score")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the router sees it: names of its conversation, lengths in tokens, its budget."""

    root: bytes
    prompt_tokens: int
    output_tokens: int
    budget: LatencyBudget


def route_of(
    config: Config,
    model: Model,
    asked: Asked,
    day: date,
    speed_of: Callable[[Pool], Speed | None],
    hits: Mapping[Place, int] = MappingProxyType({}),
) -> RouteDecision | None:
    """The decision on a fleet that is up and idle. `hits`: tokens of the prompt that replicas hold."""
    pools = [config.pools[name] for name in model.pools]
    terms = {
        pool.name: PoolTerms(
            pool.name, order, pool.profile, rates_at(pool.rates, day, asked.prompt_tokens), speed_of(pool)
        )
        for order, pool in enumerate(pools)
    }
    snapshot = [
        ReplicaState(pool.name, one.name, True, 0, hit_tokens=hits.get((pool.name, one.name), 0))
        for pool in pools
        for one in pool.replicas
    ]
    demand = Demand(asked.root, "explain", asked.prompt_tokens, asked.output_tokens, asked.budget)
    return choose(demand, snapshot, terms, (), model.routing)


def route_as_text(decision: RouteDecision, asked: Asked) -> str:
    """The candidates as a table, the chosen one first; ends with a line feed."""
    budget = asked.budget
    bounds = [
        f"{what} within {bound_us / 1e6:g} s"
        for what, bound_us in (("first token", budget.ttft_us), ("all", budget.total_us))
        if bound_us is not None
    ]
    bounds += [f"prefers {budget.prefer}"] if budget.prefer else []
    lines = [
        f"Where it would go with all replicas up and idle, by the policy {decision.policy}: "
        f"{decision.pool}/{decision.replica} ({decision.reason}).",
        f"~{asked.prompt_tokens:,} prompt tokens, ~{asked.output_tokens:,} output tokens; "
        f"{', '.join(bounds) or 'no bound'}.",
        "",
    ]
    rows = [_HEAD, *(_cells(one) for one in decision.candidates)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = (
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def route_record(decision: RouteDecision, asked: Asked) -> dict[str, Any]:
    """The same as plain values; times in seconds, money in nano-dollars."""
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "pool": decision.pool,
        "replica": decision.replica,
        "fits": decision.fits if asked.budget.bounds else None,
        "prompt_tokens": asked.prompt_tokens,
        "output_tokens": asked.output_tokens,
        "budget": {name: getattr(asked.budget, name) for name in asked.budget.__struct_fields__},
        "candidates": [
            {name: getattr(one, name) for name in one.__struct_fields__} for one in decision.candidates
        ],
    }


def _cells(one: Candidate) -> tuple[str, ...]:
    return (
        one.pool,
        one.replica,
        f"{one.hit_tokens:,}",
        _seconds(one.ttft_s),
        _seconds(one.total_s),
        "?" if one.cost_nano is None else format_usd(one.cost_nano),
        one.excluded or ("?" if one.fits is None else "yes" if one.fits else "no"),
        f"{one.score:.6g}",
    )


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f} s"
