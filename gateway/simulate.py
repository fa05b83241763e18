"""`ctxgate simulate`: the fleets, the traffic and the tables. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway.replay import percentile
from ctxgate.gateway.replay_table import table
from ctxgate.inference.rates import NANO_PER_DOLLAR, Rates
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.simulated_gateway import PoolSetup
from ctxgate.routing.simulated_load import Call, Class, Shape, arrivals, tasks_per_second, uniform
from ctxgate.routing.simulation import Fleet, Simulation
from ctxgate.routing.snapshot import LatencyBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.routing.simulation import Served

SESSIONS: Final = "sessions"
UNIQUE: Final = "no-sharing"
HOT: Final = "hot-prefix"
SECONDS: Final = {SESSIONS: 9000.0, UNIQUE: 400.0, HOT: 400.0}
"""How long tasks arrive, by mix of traffic; the first half warms the fleet up and is not measured."""
AGENT: Final = "agent"
INTERACTIVE: Final = "interactive"
CLASSES: Final = (
    Class("batch", (AGENT, INTERACTIVE), 25, LatencyBudget(prefer="standard")),
    Class(INTERACTIVE, (INTERACTIVE,), 75, LatencyBudget(ttft_us=1_000_000, prefer="fast")),
    Class(AGENT, (AGENT,), 75, LatencyBudget(ttft_us=15_000_000, prefer="fast")),
)
_SHAPES: Final = 64
_HOT_TOKENS: Final = 16_000
_DAY: Final = date(1970, 1, 1)


def _rates(uncached: float, cached: float, output: float) -> Rates:
    nano = [round(dollars * NANO_PER_DOLLAR) for dollars in (uncached, cached, output)]
    return Rates(nano[0], nano[1], nano[2], nano[0], effective=_DAY)


FLEET: Final = Fleet(
    (
        PoolSetup("standard", "standard", PROFILES["standard"], 8, 4_000_000, _rates(0.6, 0.06, 2.4)),
        PoolSetup("fast", "fast", PROFILES["fast"], 4, 2_000_000, _rates(1.2, 0.12, 4.8)),
    )
)


@dataclass(frozen=True, slots=True)
class Result:
    """A policy under one mix and load. Times are seconds; None where nothing is to be told.

    `hit_rate`: cached tokens of the engines over prompt tokens; `of_oracle`: over what one cache without end
    would have held. `within`: the share of the requests with a bound that were answered inside it, refused
    ones among them. Dollars are those of all tasks, to their ends.
    """

    mix: str
    load: float
    policy: str
    requests: int
    refused: int
    hit_rate: float
    of_oracle: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    within: float | None
    dollars_per_task: float
    fast_share: float


def shapes_of(mix: str, sessions: Sequence[Shape]) -> list[Shape]:
    """The tasks of a mix: the sessions, or single requests that share nothing or one long head."""
    if mix == SESSIONS:
        return list(sessions)
    head = _HOT_TOKENS if mix == HOT else 0
    shapes: list[Shape] = []
    for number in range(_SHAPES):
        drawn = uniform("prompt", number)
        own = int(100 * 20**drawn) if head else int(500 * 40**drawn)
        call = Call(head + own, int(32 * 16 ** uniform("output", number)), 0.0)
        shapes.append(Shape(f"{mix} {number}", INTERACTIVE, HOT if head else None, head, (call,)))
    return shapes


def simulate(
    mix: str, shapes: Sequence[Shape], load: float, policy: str, seconds: float, seed: str
) -> Result:
    """One policy at `load`, a share of what the fleet can take at most with every prefix where it is warm."""
    fleet = [(pool.profile, pool.kv_tokens, pool.replicas) for pool in FLEET.pools]
    tasks = arrivals(shapes, CLASSES, load * tasks_per_second(shapes, fleet), seconds, seed)
    served = Simulation(FLEET, policy).run(tasks)
    measured = [one for one in served if seconds / 2 <= one.at_s < seconds]
    nano = sum(one.cost_nano for one in served)
    return _result(mix, load, policy, measured, nano / NANO_PER_DOLLAR / max(len(tasks), 1))


def _result(mix: str, load: float, policy: str, served: Sequence[Served], dollars: float) -> Result:
    answered = [one for one in served if one.pool is not None]
    prompt, cached = sum(one.prompt for one in answered), sum(one.cached for one in answered)
    oracle = sum(one.oracle for one in answered)
    bounded = [one.within for one in served if one.within is not None]
    ttft = [one.ttft_s for one in answered if one.ttft_s is not None]
    return Result(
        mix,
        load,
        policy,
        len(served),
        len(served) - len(answered),
        cached / max(prompt, 1),
        cached / oracle if oracle else None,
        percentile(ttft, 50),
        percentile(ttft, 90),
        percentile(ttft, 99),
        sum(bounded) / len(bounded) if bounded else None,
        dollars,
        sum(one.pool == "fast" for one in answered) / max(len(answered), 1),
    )


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as JSON; null is unknown."""
    return [asdict(result) for result in results]


def as_text(results: Sequence[Result], *, color: bool = False) -> str:
    """One table for each mix and load."""
    parts: list[str] = []
    for mix, load in dict.fromkeys((each.mix, each.load) for each in results):
        rows = [_row(each) for each in results if (each.mix, each.load) == (mix, load)]
        parts.append(f"{mix}, load {load:g}\n{table(_HEADERS, rows, color=color)}")
    return "\n\n".join(parts)


_HEADERS: Final = (
    "policy",
    "requests",
    "refused",
    "hits %",
    "of oracle",
    "TTFT p50 s",
    "p90",
    "p99",
    "within %",
    "$ per task",
    "on fast %",
)


def _row(result: Result) -> list[str]:
    return [
        result.policy,
        f"{result.requests:,}",
        str(result.refused),
        f"{100 * result.hit_rate:.2f}",
        "-" if result.of_oracle is None else f"{result.of_oracle:.4f}",
        *(
            "-" if t is None else f"{t:.3f}"
            for t in (result.ttft_p50_s, result.ttft_p90_s, result.ttft_p99_s)
        ),
        "-" if result.within is None else f"{100 * result.within:.2f}",
        f"{result.dollars_per_task:.4f}",
        f"{100 * result.fast_share:.1f}",
    ]
