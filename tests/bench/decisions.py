"""What choosing a replica costs: CPU time of `RoutingStage.route`, for prompts of a million tokens.

usage: python -m tests.bench.decisions [--runs N]

The whole decision as a request pays for it: what each replica should find in its cache, the snapshot of the
fleet, predictions and prices, the choice, and keeping it for `ctxgate explain`. A turn of a conversation that
went to one replica before, on a fleet whose replicas tell their load; the prompt was hashed before, once,
when it was planned.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

from msgspec import structs
from tests.bench.bodies import chat_body

from ctxgate.gateway.config import Key, Model, Pool, Replica
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.flow import Allowed, Identified, Inbound, Planned, Surface, Task
from ctxgate.gateway.kv_stage import KvStage
from ctxgate.gateway.misses import Misses
from ctxgate.gateway.routing import RoutingStage
from ctxgate.gateway.seen import Lead, Seen
from ctxgate.gateway.services import Ratios
from ctxgate.gateway.speeds import Speeds
from ctxgate.gateway.telemetry import Telemetry
from ctxgate.inference import wire
from ctxgate.inference.engine_load import EngineLoad
from ctxgate.inference.rates import RateCard, Rates
from ctxgate.routing.latency import default_speed
from ctxgate.routing.snapshot import LatencyBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.services import Services
    from ctxgate.routing.snapshot import Profile

TOKENS: Final = 1_000_000
SHORT_TOKENS: Final = 20_000
BYTES_PER_TOKEN: Final = 4
RUNS: Final = 600
WARM_UP: Final = 50
KV_TOKENS: Final = 4_000_000
_BUDGET: Final = LatencyBudget(ttft_us=15_000_000, prefer="fast", source="class")
_DAY: Final = date(2026, 1, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """Replicas of the standard and of the fast pool, and how many of them know how much of the prompt.

    `warm`: so many have read all of it; `heads`: the others have read its head.
    """

    name: str
    standard: int
    fast: int
    warm: int
    heads: bool = False
    tokens: int = TOKENS


CASES: Final = (
    Case("64 replicas, none warm", 44, 20, 0),
    Case("64 replicas, one warm", 44, 20, 1),
    Case("64 replicas, one warm, the others know its head", 44, 20, 1, heads=True),
    Case("64 replicas, all warm", 44, 20, 64),
    Case("64 replicas of one pool, one warm", 64, 0, 1),
    Case("4 replicas of one pool, one warm", 4, 0, 1, tokens=SHORT_TOKENS),
    Case("2 replicas of two pools, one warm", 1, 1, 1, tokens=SHORT_TOKENS),
    Case("a lone replica, warm", 1, 0, 1, tokens=SHORT_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Decided:
    """One row: microseconds of CPU of a decision."""

    case: str
    tokens: int
    replicas: int
    p50_us: float
    p90_us: float
    least_us: float

    @property
    def barred(self) -> bool:
        """Whether there is a bar for this row."""
        return self.replicas == 64


class Bench:
    """A routing stage over replicas that nobody calls."""

    def __init__(self, case: Case) -> None:
        self.case = case
        pools = {
            pool.name: pool
            for pool in (_pool("standard", case.standard, 1), _pool("fast", case.fast, 2))
            if pool.replicas
        }
        self._misses = Misses(_failed, seed=1)
        self._services = SimpleNamespace(
            config=SimpleNamespace(pools=pools, models={}),
            fleet=Fleet(pools),
            misses=self._misses,
            telemetry=Telemetry(),
            speeds=Speeds(pools.values()),
            prompt_ratios=Ratios(),
            now_us=lambda: 0,
        )
        self._services.kv = KvStage(cast("Services", self._services))
        self.stage = RoutingStage(cast("Services", self._services))
        self._body = wire.parse(chat_body(case.tokens * BYTES_PER_TOKEN, stream=True))
        self._plan = SimpleNamespace(size=len(self._body.raw))
        self._model = Model("mock", tuple(pools))
        self._pools = tuple(pools.values())
        self._seen = self._read()
        self._busy()

    def _read(self) -> Seen:
        """Let the warm replicas read the prompt, but for its last two messages."""
        seen = self._misses.look(self._identified("first"), self._body, None)
        assert seen is not None
        chain, sizes = seen.sent.chain, seen.sent.sizes
        places = [(pool.name, replica.name) for pool in self._pools for replica in pool.replicas]
        for at, place in enumerate(places):
            known = len(chain) - 2 if at < self.case.warm else 2 if self.case.heads else 0
            prompt = self.case.tokens * sum(sizes[:known]) // sum(sizes)
            if known:
                learn = self._misses.index.learn
                learn(place, chain[:known], sizes[:known], prompt=prompt, cached=0, now_us=0)
        return seen

    def _busy(self) -> None:
        """Have attempts open at every replica, their prompts under way, and each replica tell its load."""
        fleet, index = self._services.fleet, self._misses.index
        for at, record in enumerate(fleet.records()):
            place = (record.pool.name, record.replica.name)
            for number in range(at % 5):
                taken = fleet.taken(*place, new=500 * number, length=20_000)
                taken.__enter__()
                if number:
                    taken.first_token()
                ticket = f"open {at} {number}"
                index.dispatched(ticket, place, [ticket.encode()] * 9, [1] * 9, prompt=20_000, now_us=0)
            fleet.told_load(*place, EngineLoad(at % 5 + 1, 0, 0.3, KV_TOKENS))
            self.stage.conversations.went(f"other {at}", place, 0, tokens=100_000 * (at % 7))

    def _identified(self, request_id: str) -> Identified:
        inbound = Inbound(request_id, Surface.CHAT, {}, self._body, (), "mock", stream=True, received_at_us=0)
        key = Key("key", b"", "alpha", "acme")
        return Identified(inbound, key, Task("t", "header"), b"root", budget=_BUDGET)

    def planned(self, number: int) -> Planned:
        """A turn of the conversation as it comes to the stage."""
        allowed = Allowed(self._identified(f"request-{number}"), self._model, self._pools)
        lead = Lead(asked=True)  # its chunks are asked for where a conversation begins
        seen: Seen = structs.replace(self._seen, lead=lead)
        return Planned(allowed, self._plan, "off", seen)  # type: ignore[arg-type]  # no more is asked of them

    def spent_us(self, number: int) -> float:
        """CPU microseconds of one decision."""
        planned = self.planned(number)
        began = time.thread_time_ns()
        routed = self.stage.route(planned)
        spent = time.thread_time_ns() - began
        assert routed is not None, "no replica was chosen"
        return spent / 1000


def measure(runs: int = RUNS, cases: Sequence[Case] = CASES) -> list[Decided]:
    """All cases."""
    return [_measured(case, runs) for case in cases]


def _measured(case: Case, runs: int) -> Decided:
    bench = Bench(case)
    spent = [bench.spent_us(number) for number in range(WARM_UP + runs)][WARM_UP:]
    ordered = sorted(spent)
    return Decided(
        case.name,
        case.tokens,
        case.standard + case.fast,
        statistics.median(ordered),
        ordered[int(0.9 * len(ordered))],
        ordered[0],
    )


def _pool(name: Profile, replicas: int, price: int) -> Pool:
    servers = tuple(Replica(f"{name}-{at}", f"http://127.0.0.1:{at + 1}") for at in range(replicas))
    rates = Rates(price * 10**9, price * 10**8, 4 * price * 10**9, price * 10**9, _DAY)
    return Pool(name, servers, RateCard(((rates,),)), profile=name, speed=default_speed(name))


def _failed() -> None:
    raise AssertionError("a prompt was not explained")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(prog="decisions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args(argv)
    print("microseconds of CPU: p50      p90    least")
    for cost in measure(args.runs):
        print(f"{cost.p50_us:24.1f} {cost.p90_us:8.1f} {cost.least_us:8.1f}  {cost.case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
