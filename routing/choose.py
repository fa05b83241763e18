"""The choice of a replica for one attempt: pure, on a snapshot, with the reasons kept.

    1. Replicas that meet the latency budget as predicted; if none does, the fastest.
    2. Of these the least burden, in nano-dollars:
         the exact price of the attempt there, with the cached tokens expected there
       + waiting behind others, at WAIT of the price of the replica's time
       + room in its cache, dearer the more of it live conversations fill (RENT)
       + what leaving the warmest replica costs above the conversation's credit
       and, where a conversation begins, more for a prediction that takes much of its bound (RISK).
    3. Of those near the least: the preferred profile, the least predicted time, a hash of the request's id.

Without a bound, `prefer: fast` pays for every second of the whole answer instead of the waiting. Where
prices are unknown, the preferred profile comes first, then the model's own order of pools, then time.

A conversation of which no replica of the chosen pool knows more than another goes by rendezvous hashing of
its root over those that are not much busier than the least busy one. So every gateway process sends it to
the same replica, and a lost replica moves only its own conversations, spread over the others.

The work that waits is what balances: a prefix that many conversations share is computed anew elsewhere as
soon as that costs less than waiting for it. Each replica is weighed alone: one that is overrun keeps no
other from its conversations. The constants are those under which `ctxgate simulate` did best.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import takewhile
from math import ceil, inf
from typing import TYPE_CHECKING, Final

from ctxgate.inference.rates import TOKENS_PER_RATE
from ctxgate.inference.record import Record
from ctxgate.routing.candidates import (
    UNHEALTHY,
    Candidate,
    RouteDecision,
    divide,
    predict,
    rendezvous_score,
)
from ctxgate.routing.policies import BASELINES, CTXGATE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ctxgate.routing.candidates import Open
    from ctxgate.routing.snapshot import Demand, LatencyBudget, PoolTerms, ReplicaState

__all__ = ["Candidate", "RouteDecision", "choose", "rendezvous", "rendezvous_score"]

NEAR: Final = 1.02
"""Burdens up to so many times the least are equal; preference and time decide among them."""
BOUND: Final = 1.25
"""How much more than the least burden the home of an unknown conversation may have."""
QUIET: Final = 8
"""So many attempts in flight keep no conversation from its home where speeds are unknown."""
WAIT: Final = 0.8
"""The price of a second of waiting, in prices of a second of prefill. Below 1, or else a prompt whose prefix
is being computed would go and compute it once more elsewhere."""
SAFE: Final = 0.16
"""A prediction that takes no more of its bound than this is safe."""
RISK: Final = 30.0
"""What is added to a burden whose prediction takes all of its bound, in times the burden. Only where a
conversation begins: one that has begun would pay in the dearer pool for all of its further requests."""
RENT: Final = 2.0
"""What a token newly kept in a cache full of live conversations costs, in prices of computing one anew."""

_FITS, _UNKNOWN, _LATE = range(3)
_LEVEL: Final = (False, 0)


class _Worth(Record, frozen=True):
    """Nano-dollars in one pool: of a second of the answer, of a second of waiting, of a token's room."""

    hurry: float
    wait: float
    rent: float


class _Weighed:
    """An open replica: whether it fits, how late it would be, and its burden.

    The burden is nano-dollars where the price is known, else seconds. `aside`: what the burden cannot tell,
    the pool's place by preference and order.
    """

    __slots__ = ("aside", "burden", "late_s", "one", "rank")

    def __init__(self, one: Open, rank: int, late_s: float, aside: tuple[bool, int], burden: float) -> None:
        self.one = one
        self.rank = rank
        self.late_s = late_s
        self.aside = aside
        self.burden = burden

    def order(self) -> tuple[int, float, bool, tuple[bool, int], float]:
        return self.rank, self.late_s, self.one.cost_nano is None, self.aside, self.burden


def choose(
    demand: Demand,
    snapshot: Sequence[ReplicaState],
    pools: Mapping[str, PoolTerms],
    tried: Collection[str] = (),
    policy: str = CTXGATE,
    *,
    turn: int = 0,
) -> RouteDecision | None:
    """The replica for an attempt, or None when there is none left.

    `pools` holds the terms of the snapshot's pools; of a pool without any nothing is predicted. `turn`
    counts decisions, for the policy that goes round. Raises KeyError for an unknown policy.
    """
    states, out = divide(snapshot, tried)
    if not states:
        return None
    found = predict(demand, states, pools)
    if policy == CTXGATE:
        ranked, reason = _ranked(found, demand, pools)
    else:
        ranked, reason = BASELINES[policy](found, demand, turn), policy
    best = ranked[0][0]
    candidates = (*(one.candidate(score) for one, score in ranked), *out)
    return RouteDecision(best.state.pool, best.state.name, policy, candidates, best.fits, reason)


def _ranked(
    found: Sequence[Open], demand: Demand, pools: Mapping[str, PoolTerms]
) -> tuple[list[tuple[Open, float]], str]:
    """Best first with their scores, and why."""
    worth = _worth(pools, demand.budget)
    weighed = [_weigh(one, demand, worth) for one in found]
    if not demand.fresh:
        _charge_leaving(weighed, demand.credit_nano)
    weighed.sort(key=_Weighed.order)
    near = _near(weighed, demand)
    if near[0].rank == _LATE:
        reason = "fastest"
    else:
        home = _home(near[0], weighed)
        reason = "home" if home else "least burden"
        near = sorted(home, key=lambda each: -_rendezvous(each.one, demand.root)) or near
    first = {id(each) for each in near}
    rest = (each for each in weighed if id(each) not in first)
    return [(each.one, -each.burden) for each in (*near, *rest)], reason


def _weigh(one: Open, demand: Demand, worth: Mapping[str, _Worth]) -> _Weighed:
    terms, cost, total = one.terms, one.cost_nano, one.total_s
    if one.fits:
        rank, late = _FITS, 0.0
    elif total is None:
        rank, late = _UNKNOWN, 0.0
    else:
        rank, late = _LATE, _late_s(one, demand.budget)
    prefer = demand.budget.prefer
    if terms is None:
        return _Weighed(one, rank, late, (prefer is not None, 0), 0.0)
    aside = (prefer is not None and terms.profile != prefer, terms.order)
    if cost is None:
        return _Weighed(one, rank, late, aside, one.ttft_s or 0.0)
    if one.wait_s is None or total is None:
        return _Weighed(one, rank, late, aside if prefer == "fast" else _LEVEL, cost)
    state, prices = one.state, worth[terms.name]
    burden = cost + (prices.hurry * total if prices.hurry else prices.wait * one.wait_s)
    if state.live_tokens and state.kv_tokens:
        kept = demand.prompt_tokens - one.hit + demand.output_tokens
        burden += prices.rent * kept * state.live_tokens / state.kv_tokens
    if demand.fresh and one.used > SAFE and rank == _FITS:
        burden *= 1.0 + RISK * (one.used - SAFE) / (1.0 - SAFE)
    return _Weighed(one, rank, late, _LEVEL, burden)


def _late_s(one: Open, budget: LatencyBudget) -> float:
    """How much later than the budget an attempt would be."""
    first = -inf if budget.ttft_us is None else (one.ttft_s or 0.0) - budget.ttft_us / 1e6
    last = -inf if budget.total_us is None else (one.total_s or 0.0) - budget.total_us / 1e6
    return max(first, last)


def _worth(pools: Mapping[str, PoolTerms], budget: LatencyBudget) -> dict[str, _Worth]:
    """What time and room are worth in each pool.

    A request without a bound that prefers to be fast pays for each second of the whole answer what a second
    costs where it costs most.
    """
    seconds = {terms.name: _second(terms) for terms in pools.values()}
    hurried = budget.prefer == "fast" and not budget.bounds
    hurry = max(seconds.values(), default=0.0) if hurried else 0.0
    found: dict[str, _Worth] = {}
    for terms in pools.values():
        rates = terms.rates
        lost = 0 if rates is None else max(rates.uncached - rates.cached, 0)
        found[terms.name] = _Worth(hurry, WAIT * seconds[terms.name], RENT * lost / TOKENS_PER_RATE)
    return found


def _second(terms: PoolTerms) -> float:
    """The price of a second of a replica that prefills, in nano-dollars; 0 where it is not known."""
    if terms.rates is None or terms.speed is None:
        return 0.0
    return terms.rates.uncached / TOKENS_PER_RATE / max(terms.speed.linear_s, 1e-12)


def _charge_leaving(weighed: Sequence[_Weighed], credit_nano: int) -> None:
    """What it costs more to leave the warmest replica counts twice, as far as no credit covers it."""
    warmest = max(weighed, key=lambda each: each.one.hit).one
    if not warmest.hit or warmest.cost_nano is None:
        return
    free = warmest.cost_nano + credit_nano
    for each in weighed:
        cost = each.one.cost_nano
        if cost is not None and cost > free:
            each.burden += cost - free


def _near(weighed: Sequence[_Weighed], demand: Demand) -> list[_Weighed]:
    """Those that are as good as the first one, the best in front."""
    rank, late, unpriced, aside, burden = weighed[0].order()
    most = (rank, late, unpriced, aside, max(burden * NEAR, burden))  # margins may bring it below zero
    near = list(takewhile(lambda each: each.order() <= most, weighed))  # they are sorted
    if len(near) == 1:
        return near
    prefer = demand.budget.prefer
    timed = [
        ((prefer is not None and not _is(each.one, prefer), each.one.ttft_s or 0.0), each) for each in near
    ]
    least = min(key for key, _ in timed)
    key = demand.request_id.encode()[:64]
    first = min((each for found, each in timed if found == least), key=lambda each: _hash(key, each.one))
    return [first, *(each for each in near if each is not first)]


def _is(one: Open, profile: str) -> bool:
    return one.terms is not None and one.terms.profile == profile


def _home(best: _Weighed, weighed: Sequence[_Weighed]) -> list[_Weighed]:
    """The replicas among which an unknown conversation has its home; none where one knows more of it."""
    pool = best.one.state.pool
    peers = [each for each in weighed if each.one.state.pool == pool and each.rank == best.rank]
    if any(each.one.hit != best.one.hit for each in peers):
        return []
    total = 1 + sum(each.one.state.in_flight for each in peers)
    most = ceil(BOUND * total / len(peers))
    if best.one.ttft_s is None:
        most = max(QUIET, most)
    most_burden = BOUND * min(each.burden for each in peers)
    return [each for each in peers if each.burden <= most_burden and each.one.state.in_flight < most]


def _rendezvous(one: Open, root: bytes) -> float:
    return rendezvous_score(root, one.state.pool, one.state.name)


def _hash(key: bytes, one: Open) -> bytes:
    return blake2b(f"{one.state.pool}\0{one.state.name}".encode(), key=key, digest_size=8).digest()


def rendezvous(
    root: bytes, snapshot: Sequence[ReplicaState], tried: Collection[str] = ()
) -> RouteDecision | None:
    """The first healthy, untried replica in the root's rendezvous order; None when there is none."""
    states, out = divide(snapshot, tried)
    ranked = sorted(
        (
            Candidate(
                s.pool,
                s.name,
                rendezvous_score(root, s.pool, s.name),
                None if s.healthy else UNHEALTHY,
                s.hit_tokens,
            )
            for s in states
        ),
        key=lambda each: -each.score,
    )
    if not ranked:
        return None
    return RouteDecision(ranked[0].pool, ranked[0].replica, "rendezvous", (*ranked, *out))
