"""The demo's comparison: one recorded agent session, played straight at a pool and through ctxgate.

Both ways send the same prompts to the same server. The direct one carries a cache salt of its own and
each case opens with a line of its own, so that none finds the blocks of another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.perturb import Perturbation
from ctxgate.gateway.replay import Played, Sums, percentile, summarize
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.replay_table import HEADERS, cells, table
from ctxgate.inference.oracle import PrefixOracle
from ctxgate.inference.rates import charge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import date
    from pathlib import Path

    from ctxgate.gateway.replay_run import Tokenize
    from ctxgate.gateway.sessions import Session
    from ctxgate.inference.rates import RateCard

# Dollars per million tokens of a small open model: a throughput pool, and a latency pool at a higher price.
_RATES: Final = {
    "standard": {"uncached": "0.15", "cached": "0.0375", "output": "0.60"},
    "fast": {"uncached": "0.45", "cached": "0.1125", "output": "1.80"},
}
_MAX_TOKENS: Final = 8
MODELS: Final = {"standard": "demo", "fast": "demo-fast"}  # the model name that a pool serves
_LEGEND: Final = (
    "oracle: the most prompt tokens that earlier requests can have left in the cache; "
    "cached/oracle: the share of them that hit."
)


@dataclass(frozen=True, slots=True)
class Case:
    """One way for the client to behave, played against one pool both ways."""

    pool: str
    label: str
    perturbations: frozenset[Perturbation] = frozenset()


CASES: Final = (
    Case("standard", "standard pool"),
    Case("fast", "fast pool"),
    Case("fast", "fast pool, tools shuffled", frozenset({Perturbation.TOOL_ORDER})),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A case's sums both ways; `ttft_added_s` holds what each request's first token took longer through."""

    case: Case
    direct: Sums
    through: Sums
    ttft_added_s: tuple[float, ...] = ()


def config_text(
    twins: Mapping[str, str], served: str, port: int, ledger: Path, key_sha256: str, day: date
) -> str:
    """A configuration for the two twins and one client key; JSON, which is YAML as well."""
    pools = {
        pool: {
            "replicas": [url],
            "probe": False,  # its calls would stand among the demo's in the report
            "rates": {
                "effective": day.isoformat(),
                **{f"usd_per_million_{kind}": float(usd) for kind, usd in _RATES[pool].items()},
            },
        }
        for pool, url in twins.items()
    }
    models = {MODELS[pool]: {"pools": [pool], "served_name": served} for pool in twins}
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "store": {"sqlite": str(ledger)},
        "pools": pools,
        "models": models,
        "teams": {"demo": {"organisation": "example"}},
        "keys": [{"id": "demo-key", "team": "demo", "sha256": key_sha256}],
    }
    return json.dumps(config, indent=2)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where to play: the twins' URLs, the gateway's, and how a pool prices."""

    twins: Mapping[str, str]
    gateway: str
    key: str
    served: str
    rates: Mapping[str, RateCard]
    day: date
    tokenize: Tokenize
    block_size: int
    max_context: int | None


def opened(session: Session, line: str) -> Session:
    """The session with a line of its own at the very start of its system prompt."""
    head = session.messages[0]
    return replace(
        session, messages=({**head, "content": f"{line}\n{head['content']}"}, *session.messages[1:])
    )


async def compare(
    stage: Stage, session: Session, case: Case, progress: Callable[[str, int], None]
) -> Compared:
    """Play the session both ways. The direct way is priced with the pool's own rates."""
    session = opened(session, f"[{case.label}]")
    plan = Plan(
        model=stage.served,
        max_tokens=_MAX_TOKENS,
        perturbations=case.perturbations,
        max_context=stage.max_context,
        extra={"cache_salt": f"direct, {case.label}"},
    )
    direct = await _play(stage, session, stage.twins[case.pool], None, plan, progress)
    priced = [_priced(each, stage.rates[case.pool], stage.day) for each in direct]
    plan = replace(plan, model=MODELS[case.pool], task_prefix=f"{case.label}: ", extra={})
    through = await _play(stage, session, stage.gateway, stage.key, plan, progress)
    return Compared(case, summarize(priced), summarize(through), added(priced, through))


def added(direct: Sequence[Played], through: Sequence[Played]) -> tuple[float, ...]:
    """Seconds that each request's first token took longer through the gateway, where both are known."""
    one, two = (
        {(each.session, measure.turn): measure.ttft_s for each in played for measure in each.measures}
        for played in (direct, through)
    )
    pairs = ((ttft, two.get(key)) for key, ttft in one.items())
    return tuple(after - before for before, after in pairs if before is not None and after is not None)


async def _play(
    stage: Stage,
    session: Session,
    url: str,
    key: str | None,
    plan: Plan,
    progress: Callable[[str, int], None],
) -> list[Played]:
    oracle = PrefixOracle(stage.block_size)
    async with Backend(url, key) as backend:
        player = Player(backend, plan, oracle=oracle, tokenize=stage.tokenize, progress=progress)
        return await player.play([session])


def _priced(played: Played, rates: RateCard, day: date) -> Played:
    measures = [
        measure if measure.error else replace(measure, cost_nano=charge(measure.usage, rates, day).total)
        for measure in played.measures
    ]
    return replace(played, measures=measures)


def comparison(compared: Sequence[Compared], *, color: bool) -> str:
    """The table, two rows per case, and what follows from it."""
    rows: list[list[str]] = []
    for each in compared:
        rows.append([each.case.label, *[""] * len(HEADERS)])
        rows.append(["  direct", *cells(each.direct)])
        rows.append(["  through ctxgate", *cells(each.through)])
    lines = [table(("", *HEADERS), rows, color=color), _LEGEND, "", *(_verdict(each) for each in compared)]
    return "\n".join([*lines, *_lessons(compared)])


def _lessons(compared: Sequence[Compared]) -> Iterator[str]:
    """What a client's habit costs: its case against the plain one of the same pool."""
    plain = {each.case.pool: each.through for each in compared if not each.case.perturbations}
    for each in compared:
        base = plain.get(each.case.pool)
        if not each.case.perturbations or base is None or base.failed or each.through.failed:
            continue
        hits = [_hit_percent(one) for one in (base, each.through)]
        costs = [one.cost_nano.value for one in (base, each.through)]
        if None in hits or None in costs or not costs[0]:
            continue
        yield (
            f"{each.case.label}: the cache serves {hits[1]} of the prompt instead of {hits[0]}, and the same "
            f"work costs {(costs[1] or 0) / costs[0]:.1f} times as much. Send the tools in one order."
        )


def _hit_percent(sums: Sums) -> str | None:
    if sums.cached.value is None or not sums.prompt.value:
        return None
    return f"{sums.cached.value * 100 / sums.prompt.value:.0f}%"


def _verdict(compared: Compared) -> str:
    """One honest sentence: whether the gateway changed what the cache could do, and what it added."""
    direct, through = compared.direct, compared.through
    cached = (direct.cached.value, through.cached.value)
    label = compared.case.label
    if None in cached or direct.failed or through.failed:
        return f"{label}: not comparable, some requests failed or reported no usage"
    if (direct.prompt, direct.cached) == (through.prompt, through.cached):
        text = f"{label}: the same prompts, the same hits"
    else:
        text = f"{label}: cached tokens {cached[0]:,} direct, {cached[1]:,} through ctxgate"
    if direct.cost_nano == through.cost_nano:
        text += ", the same cost"
    return text + _delay(compared.ttft_added_s)


def _delay(added_s: Sequence[float]) -> str:
    """What the gateway added to the first token, where that stands out of the spread between requests."""
    median, low, high = (percentile(added_s, percent) for percent in (50, 25, 75))
    if median is None or low is None or high is None:
        return ""
    if median <= high - low:
        return "; the difference in TTFT is within noise"
    return f"; TTFT {median * 1000:+.1f} ms"
