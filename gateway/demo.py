"""The demo's comparison: one recorded agent session, played straight at a pool and through ctxgate.

Both ways the client sends the same requests to the same server. The direct one carries a cache salt of
its own and each case opens with a line of its own, so that none finds the blocks of another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ctxgate.compression.diverge import diverge
from ctxgate.compression.divergence import DivergenceKind
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay import Played, Sums, summarize
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player, request_body
from ctxgate.inference import wire
from ctxgate.inference.oracle import PrefixOracle
from ctxgate.inference.rates import charge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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
PLAIN: Final = "demo"
DECLARING: Final = "demo-declaring"
TEAMS: Final[Mapping[str, Mapping[str, object]]] = {
    PLAIN: {},  # the default level
    DECLARING: {"layout": {"level": "declared", "volatile": ["clock"]}},
}
"""What the configuration says of each team beyond its organisation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way for the client to behave, played against one pool both ways.

    `remedy` says what the gateway does about it, at the layout level of `team`.
    """

    pool: str
    label: str
    perturbations: frozenset[Perturbation] = frozenset()
    team: str = PLAIN
    remedy: str = ""


CASES: Final = (
    Case("standard", "standard pool"),
    Case("fast", "fast pool"),
    Case(
        "fast",
        "fast pool, tools shuffled",
        frozenset({Perturbation.TOOL_ORDER}),
        remedy="ctxgate sends them in the order first seen (layout safe, the default).",
    ),
    Case(
        "fast",
        "fast pool, clock in prompt",
        frozenset({Perturbation.CLOCK}),
        DECLARING,
        "ctxgate sends the time in a note at the end (layout declared, volatile: [clock]).",
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A case's sums both ways.

    `ttft_added_s`: what each request's first token took longer through the gateway. `why`: where the
    client breaks its own prefix, as a sentence, "" where it does not.
    """

    case: Case
    direct: Sums
    through: Sums
    ttft_added_s: tuple[float, ...] = ()
    why: str = ""


def config_text(
    twins: Mapping[str, str], served: str, port: int, ledger: Path, sha256s: Mapping[str, str], day: date
) -> str:
    """A configuration for the two twins and a key of each team (its hash); JSON, which is YAML as well."""
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
        "teams": {team: {"organisation": "example", **more} for team, more in TEAMS.items()},
        "keys": [{"id": f"{team}-key", "team": team, "sha256": sha256} for team, sha256 in sha256s.items()],
    }
    return json.dumps(config, indent=2)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where to play: the twins' URLs, the gateway's with each team's key, and how a pool prices."""

    twins: Mapping[str, str]
    gateway: str
    keys: Mapping[str, str]
    served: str
    rates: Mapping[str, RateCard]
    day: date
    block_size: int


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
        extra={"cache_salt": f"direct, {case.label}"},
    )
    direct = await _play(session, stage.twins[case.pool], None, plan, progress)
    priced = [_priced(each, stage.rates[case.pool], stage.day) for each in direct]
    plan = replace(plan, model=MODELS[case.pool], task_prefix=f"{case.label}: ", extra={})
    through = await _play(session, stage.gateway, stage.keys[case.team], plan, progress)
    return Compared(case, summarize(priced), summarize(through), added(priced, through), why(session, case))


def added(direct: Sequence[Played], through: Sequence[Played]) -> tuple[float, ...]:
    """Seconds that each request's first token took longer through the gateway, where both are known."""
    one, two = (
        {(each.session, measure.turn): measure.ttft_s for each in played for measure in each.measures}
        for played in (direct, through)
    )
    pairs = ((ttft, two.get(key)) for key, ttft in one.items())
    return tuple(after - before for before, after in pairs if before is not None and after is not None)


def why(session: Session, case: Case) -> str:
    """Where the case's client first breaks its own prefix, in a sentence; "" where it never does."""
    plan = Plan(model=MODELS[case.pool], perturbations=case.perturbations)
    bodies = (wire.parse(request_body(perturb(turn, case.perturbations), plan)) for turn in session.turns())
    for before, after in pairwise(bodies):
        found = diverge(before, after, rendered_only=True)
        if found.kind is not DivergenceKind.EXTENDS:
            return found.prose().partition("\n")[0]
    return ""


async def _play(
    session: Session, url: str, key: str | None, plan: Plan, progress: Callable[[str, int], None]
) -> list[Played]:
    async with Backend(url, key) as backend:
        return await Player(backend, plan, progress=progress).play([session])


def _priced(played: Played, rates: RateCard, day: date) -> Played:
    measures = [
        measure if measure.error else replace(measure, cost_nano=charge(measure.usage, rates, day).total)
        for measure in played.measures
    ]
    return replace(played, measures=measures)


def most(session: Session, tokenize: Tokenize, block_size: int) -> float | None:
    """The largest share of the session's prompt tokens that earlier requests can have left in a cache."""
    oracle, prompt, cached = PrefixOracle(block_size), 0, 0
    for turn in session.turns():
        ids = tokenize(turn.messages, turn.tools)
        if ids is None:
            return None
        prompt += len(ids)
        cached += oracle.observe(ids)
    return cached / prompt if prompt else None
