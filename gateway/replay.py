"""What a replay measures: one record per request, and the sums over a session or a whole run.

Sums run over what is known and say when something is missing: a figure nobody reported is shown as
unknown, never as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from ctxgate.inference.rates import format_usd
from ctxgate.inference.usage import NOTHING_KNOWN, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Measure:
    """One request of a replay. Durations are seconds on the client's clock.

    `error` says why the request failed; its tokens are then unknown. `oracle` is the most tokens that
    earlier prompts could have left cached, by the local count `counted` of this prompt.
    """

    turn: int
    usage: Usage = NOTHING_KNOWN
    cost_nano: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    error: str | None = None
    counted: int | None = None
    oracle: int | None = None


@dataclass(slots=True)
class Played:
    """One session as far as it was played. `stopped` says why it ended before its last request."""

    session: str
    task: str
    requests_recorded: int
    measures: list[Measure] = field(default_factory=list)
    stopped: str | None = None
    ledger_cost_nano: int | None = None  # by the gateway's own ledger, where answers carry no cost


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over requests; `value` is None when none of them is known, `missing` counts the unknown."""

    value: int | None
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """The figures of a group of requests.

    `efficiency` is cached / oracle over the requests in which both are known, None when the oracle is 0.
    `drifted` says that a measured prompt length differs from the local count, so that the oracle is
    approximate. TTFT percentiles are seconds, nearest rank.
    """

    requests: int
    failed: int
    prompt: Total
    cached: Total
    uncached: Total
    output: Total
    cost_nano: Total
    oracle: Total
    efficiency: float | None
    drifted: bool
    ttft_p50_s: float | None
    ttft_p95_s: float | None


def total(values: Iterable[int | None]) -> Total:
    """Sum the known values and count the unknown ones."""
    every = list(values)
    known = [value for value in every if value is not None]
    return Total(sum(known) if known or not every else None, len(every) - len(known))


def percentile(values: Sequence[Number], percent: int) -> Number | None:
    """Nearest-rank percentile: the smallest value that `percent` % of all values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(ceil(len(values) * percent / 100), 1) - 1]


def summarize(played: Sequence[Played]) -> Sums:
    """Sums over all requests of these sessions. Token sums leave out failed requests."""
    measures = [measure for each in played for measure in each.measures]
    answered = [measure for measure in measures if measure.error is None]
    bounded = [
        (measure.usage.cached.value, measure.oracle)
        for measure in answered
        if measure.usage.cached.value is not None and measure.oracle is not None
    ]
    possible = sum(oracle for _, oracle in bounded)
    ttft = [measure.ttft_s for measure in answered if measure.ttft_s is not None]
    return Sums(
        requests=len(measures),
        failed=len(measures) - len(answered),
        prompt=total(measure.usage.prompt for measure in answered),
        cached=total(measure.usage.cached.value for measure in answered),
        uncached=total(measure.usage.uncached.value for measure in answered),
        output=total(measure.usage.output.value for measure in answered),
        cost_nano=_cost(played),
        oracle=total(measure.oracle for measure in answered),
        efficiency=sum(cached for cached, _ in bounded) / possible if possible else None,
        drifted=any(_drifted(measure) for measure in answered),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
    )


def _cost(played: Sequence[Played]) -> Total:
    """Per session: what the ledger booked for it, else what its answers said."""
    costs: list[int | None] = []
    for each in played:
        if each.ledger_cost_nano is not None:
            costs.append(each.ledger_cost_nano)
        else:
            costs += [measure.cost_nano for measure in each.measures if measure.error is None]
    return total(costs)


def _drifted(measure: Measure) -> bool:
    prompt = measure.usage.prompt
    return prompt is not None and measure.counted is not None and prompt != measure.counted


def as_json(sums: Sums) -> dict[str, Any]:
    """Sums as a JSON object: null is unknown, dollars are decimal strings, times are milliseconds."""
    counts = {
        "prompt_tokens": sums.prompt,
        "cached_tokens": sums.cached,
        "uncached_tokens": sums.uncached,
        "output_tokens": sums.output,
        "oracle_tokens": sums.oracle,
    }
    cost = sums.cost_nano.value
    return {
        "requests": sums.requests,
        "failed": sums.failed,
        **{name: each.value for name, each in counts.items()},
        "cost_usd": None if cost is None else format_usd(cost),
        "cost_nano": cost,
        "unknown": {
            name: each.missing
            for name, each in {**counts, "cost_nano": sums.cost_nano}.items()
            if each.missing
        },
        "efficiency": sums.efficiency,
        "oracle_approximate": sums.drifted,
        "ttft_p50_ms": _milliseconds(sums.ttft_p50_s),
        "ttft_p95_ms": _milliseconds(sums.ttft_p95_s),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
