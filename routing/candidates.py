"""The replicas that an attempt may go to, and what is predicted of it there: what every policy decides on."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from ctxgate.inference.rates import TOKENS_PER_RATE
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ctxgate.inference.rates import Rates
    from ctxgate.routing.snapshot import Demand, PoolTerms, ReplicaState

TRIED = "tried"
DRAINING = "draining"
UNHEALTHY = "unhealthy"


class Candidate(Record, frozen=True):
    """A replica with the score that ranked it; the highest wins. `excluded` says why it may not.

    What is predicted of the attempt there: cached tokens, seconds to the first and to the last token, its
    price in nano-dollars, and whether it `fits` the latency budget; None where that is not known.
    """

    pool: str
    replica: str
    score: float
    excluded: str | None = None
    hit_tokens: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    cost_nano: int | None = None
    fits: bool | None = None


class RouteDecision(Record, frozen=True):
    """The chosen replica and every candidate, best first; `fits`: as predicted, it meets the budget."""

    pool: str
    replica: str
    policy: str
    candidates: tuple[Candidate, ...]
    fits: bool | None = None
    reason: str = ""


class Open(Record, frozen=True):
    """A replica that the attempt may go to, and what is predicted of it there; None: not known.

    `wait_s` is the part of `ttft_s` that is spent behind others. `fits` is True where there is no bound;
    `used` is how much of the tightest bound the prediction takes, 0 where there is none.
    """

    state: ReplicaState
    terms: PoolTerms | None
    hit: int
    wait_s: float | None
    ttft_s: float | None
    total_s: float | None
    cost_nano: int | None
    fits: bool | None
    used: float

    def candidate(self, score: float) -> Candidate:
        """As it is kept with the decision."""
        state = self.state
        return Candidate(
            state.pool,
            state.name,
            score,
            None if state.healthy else UNHEALTHY,
            self.hit,
            self.ttft_s,
            self.total_s,
            self.cost_nano,
            self.fits,
        )


def divide(
    snapshot: Sequence[ReplicaState], tried: Collection[str]
) -> tuple[list[ReplicaState], list[Candidate]]:
    """The replicas that an attempt may go to, and the others with the reason.

    Where no replica is healthy, the others are tried all the same: a probe may be wrong, and a refusal that
    the engine would not have made is worse than one more failed attempt. One that drains takes nothing new.
    """
    healthy: list[ReplicaState] = []
    unhealthy: list[ReplicaState] = []
    out: list[Candidate] = []
    for state in snapshot:
        if state.name in tried:
            out.append(Candidate(state.pool, state.name, 0.0, TRIED, state.hit_tokens))
        elif state.draining:
            out.append(Candidate(state.pool, state.name, 0.0, DRAINING, state.hit_tokens))
        elif state.healthy:
            healthy.append(state)
        else:
            unhealthy.append(state)
    if not healthy:
        return unhealthy, out
    out[:0] = [Candidate(s.pool, s.name, 0.0, UNHEALTHY, s.hit_tokens) for s in unhealthy]
    return healthy, out


def predict(demand: Demand, states: Sequence[ReplicaState], pools: Mapping[str, PoolTerms]) -> list[Open]:
    """What each replica would make of the attempt."""
    length, output, budget = demand.prompt_tokens, demand.output_tokens, demand.budget
    first_us, last_us = budget.ttft_us, budget.total_us
    unbounded = first_us is None and last_us is None
    more, most_hit = max(output - 1, 0), max(length - 1, 0)
    found: list[Open] = []
    for state in states:
        terms = pools.get(state.pool)
        hit = state.hit_tokens if state.hit_tokens < most_hit else most_hit
        wait = ttft = total = cost = None
        fits: bool | None = unbounded or None
        used = 0.0
        if terms is not None:
            rates, speed = terms.rates, terms.speed
            if rates is not None:
                cost = price(length - hit, hit, output, rates)
            if speed is not None:
                work = state.work
                slot, ahead = 0.0, state.in_flight if work.running is None else _sequences(state)
                if work.waiting if speed.slots is None else ahead >= speed.slots:
                    slot = speed.slot_s(output, length, work, ahead)
                wait = speed.queue_s(work) + slot
                ttft = speed.ttft_s(length - hit, length, work) + slot
                total = ttft + more * speed.itl_s(length, work)
                if not unbounded:
                    if first_us is not None:
                        used = _used(ttft, first_us)
                    if last_us is not None:
                        used = max(used, _used(total, last_us))
                    fits = used <= 1.0
        found.append(Open(state, terms, hit, wait, ttft, total, cost, fits, used))
    return found


def _sequences(state: ReplicaState) -> int:
    """How many are in flight there: of this gateway, or of all its clients where the engine tells more."""
    work = state.work
    return max(state.in_flight, (work.running or 0) + (work.waiting or 0))


def _used(seconds: float, bound_us: int) -> float:
    """The share of a bound; of one that is spent already, more than of any other."""
    return seconds * 1e6 / (bound_us or 1)


def price(new: int, hit: int, output: int, rates: Rates) -> int:
    """Nano-dollars of so many uncached, cached and output tokens, each component rounded half up."""
    half = TOKENS_PER_RATE // 2
    return (
        (new * rates.uncached + half) // TOKENS_PER_RATE
        + (hit * rates.cached + half) // TOKENS_PER_RATE
        + (output * rates.output + half) // TOKENS_PER_RATE
    )


def rendezvous_score(root: bytes, pool: str, replica: str) -> float:
    """A number in [0, 1), fixed for a pair of conversation root and replica (highest random weight)."""
    digest = blake2b(f"{pool}\0{replica}".encode(), key=root[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
