"""The choice of a replica for one attempt: pure, on a snapshot, with the reasons kept.

    1. Replicas that meet the latency budget as predicted; if none does, the fastest.
    2. Of these the least burden: the exact price of the attempt there, the work that waits there already,
       priced as if it were the attempt's own, and what leaving the warmest replica costs above its credit.
    3. Of those near the least: the preferred profile, the least predicted time, a hash of the request's id.

A conversation of which no replica of the pool knows more than another goes by rendezvous hashing of its
root over those that are not much busier than the least busy one. So every gateway process sends it to the
same replica, and a lost replica moves only its own conversations, spread over the others.

The work that waits is what balances: a prefix that many conversations share is computed anew elsewhere as
soon as that costs less than waiting for it. Each replica is weighed alone: one that is overrun keeps no
other from its conversations.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil, inf
from typing import TYPE_CHECKING, Final

from ctxgate.inference.rates import TOKENS_PER_RATE
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
    from ctxgate.routing.snapshot import Demand, PoolTerms, ReplicaState

__all__ = ["Candidate", "RouteDecision", "choose", "rendezvous", "rendezvous_score"]

NEAR: Final = 1.02
"""Burdens up to so many times the least are equal; preference and time decide among them."""
BOUND: Final = 1.25
"""How much more than the least burden the home of an unknown conversation may have."""
QUIET: Final = 8
"""So many attempts in flight keep no conversation from its home where speeds are unknown."""

SAFE: Final = 0.75
"""A prediction that takes no more of its bound than this is safe: one that takes all of it is not."""
RENT: Final = 2.0
"""What a token newly kept in a cache full of live conversations costs, in prices of computing one anew."""

_SAFE, _FITS, _UNKNOWN, _LATE = range(4)


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
        ranked, reason = _ranked(found, demand)
    else:
        ranked, reason = BASELINES[policy](found, demand, turn), policy
    best = ranked[0][0]
    candidates = (*(one.candidate(score) for one, score in ranked), *out)
    return RouteDecision(best.state.pool, best.state.name, policy, candidates, best.fits, reason)


def _ranked(found: Sequence[Open], demand: Demand) -> tuple[list[tuple[Open, float]], str]:
    """Best first with their scores, and why."""
    weighed = [_weigh(one, demand) for one in found]
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


def _weigh(one: Open, demand: Demand) -> _Weighed:
    budget = demand.budget
    if one.fits:
        rank, late = _SAFE if one.used <= SAFE else _FITS, 0.0
    elif one.ttft_s is None or one.total_s is None:
        rank, late = _UNKNOWN, 0.0
    else:
        first = -inf if budget.ttft_us is None else one.ttft_s - budget.ttft_us / 1e6
        last = -inf if budget.total_us is None else one.total_s - budget.total_us / 1e6
        rank, late = _LATE, max(first, last)
    hurried = budget.prefer == "fast" and budget.ttft_us is None and budget.total_us is None
    terms, cost = one.terms, one.cost_nano
    if terms is None:
        return _Weighed(one, rank, late, (budget.prefer is not None, 0), 0.0)
    aside = (budget.prefer is not None and terms.profile != budget.prefer, terms.order)
    if cost is None or terms.rates is None:
        return _Weighed(one, rank, late, aside, one.ttft_s or 0.0)
    if terms.speed is None or one.wait_s is None or one.total_s is None:
        return _Weighed(one, rank, late, aside if hurried else (False, 0), cost)
    second = terms.rates.uncached / TOKENS_PER_RATE / max(terms.speed.linear_s, 1e-12)
    seconds = one.total_s if hurried else one.wait_s
    state, rates = one.state, terms.rates
    burden = cost + second * seconds
    if state.live_tokens and state.kv_tokens:
        kept = demand.prompt_tokens - one.hit + demand.output_tokens
        lost = max(rates.uncached - rates.cached, 0) / TOKENS_PER_RATE
        burden += RENT * lost * kept * state.live_tokens / state.kv_tokens
    return _Weighed(one, rank, late, (False, 0), burden)


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
    """Those that are as good as the first one, best first."""
    rank, late, unpriced, aside, burden = weighed[0].order()
    most = (rank, late, unpriced, aside, burden * NEAR)
    near = [each for each in weighed if each.order() <= most]
    if len(near) > 1:
        prefer, key = demand.budget.prefer, demand.request_id.encode()[:64]
        near.sort(
            key=lambda each: (
                prefer is not None and (each.one.terms is None or each.one.terms.profile != prefer),
                each.one.ttft_s or 0.0,
                _hash(key, each.one),
            )
        )
    return near


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
