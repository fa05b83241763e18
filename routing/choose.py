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
other from its conversations. Where it cannot be told what waits, neither slots nor load being known, a
replica with BOUND times the mean of its pool's open attempts gets no more (consistent hashing with bounded
loads). The constants are those under which `ctxgate simulate` did best.
"""

from __future__ import annotations

from math import ceil, inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.inference.rates import TOKENS_PER_RATE
from ctxgate.inference.record import Record
from ctxgate.routing.candidates import (
    CROWDED,
    UNHEALTHY,
    Candidate,
    Candidates,
    RouteDecision,
    digests,
    divide,
    predict,
    rendezvous_score,
)
from ctxgate.routing.policies import BASELINES, CTXGATE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ctxgate.routing.candidates import Open
    from ctxgate.routing.snapshot import Demand, LatencyBudget, PoolTerms, ReplicaState

__all__ = ["Candidate", "RouteDecision", "choose", "rendezvous", "rendezvous_score"]

NEAR: Final = 1.02
"""Burdens up to so many times the least are equal; preference and time decide among them."""
BOUND: Final = 1.25
"""How much more than the least burden the home of an unknown conversation may have, and how much more than
the mean of open attempts any replica of which it cannot be told what waits there."""
QUIET: Final = 8
"""Fewer attempts in flight keep no conversation from its home where speeds are unknown, nor are they a
crowd."""
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
_hit: Final = attrgetter("hit")


_Key: TypeAlias = "tuple[int, float, bool, tuple[bool, int], float, int]"
"""What an open replica is ranked by, the least first, and its place among them.

Whether it fits, how late it would be, whether its price is unknown, what the burden cannot tell (the pool's
place by preference and order), and the burden: nano-dollars where the price is known, else seconds.
"""


class _Worth(Record, frozen=True):
    """Nano-dollars in one pool: of a second of the answer, of a second of waiting, of a token's room.

    `aside`: the pool's place by preference and order.
    """

    hurry: float
    wait: float
    rent: float
    aside: tuple[bool, int]


_NOTHING: Final = _Worth(0.0, 0.0, 0.0, _LEVEL)


class _Ranking(Record, frozen=True):
    """The open replicas in their order: the best one, the others at `home`, then all others by their keys."""

    found: Sequence[Open]
    keys: Sequence[_Key]
    best: int
    home: Sequence[int]
    root: bytes

    def every(self) -> Iterable[Candidate]:
        """All of them, best first."""
        first = [self.best]
        if self.home:
            scores = digests(self.root, [self.found[at].state for at in self.home])
            first = [at for _, at in sorted(zip(scores, self.home, strict=True), reverse=True)]
        rest = [key[-1] for key in sorted(self.keys) if key[-1] not in first]
        return [self.found[at].candidate(-self.keys[at][4]) for at in (*first, *rest)]


def choose(
    demand: Demand,
    snapshot: Sequence[ReplicaState],
    pools: Mapping[str, PoolTerms],
    tried: Collection[str] = (),
    policy: str = CTXGATE,
    *,
    turn: int = 0,
    others: Iterable[Candidate] = (),
) -> RouteDecision | None:
    """The replica for an attempt, or None when there is none left.

    `pools` holds the terms of the snapshot's pools; of a pool without any nothing is predicted. `turn`
    counts decisions, for the policy that goes round. `others` are kept with the decision as they are: they
    were out of the question before. Raises KeyError for an unknown policy.
    """
    states, out = divide(snapshot, tried)
    if not states:
        return None
    out += others
    if policy == CTXGATE:
        states, crowded = _bounded(states, pools)
        return _decision(demand, predict(demand, states, pools), pools, [*crowded, *out])
    found = predict(demand, states, pools)
    ranked = BASELINES[policy](found, demand, turn)
    best, score = ranked[0]
    leaving = _leaving_nano(best, max((one for one, _ in ranked), key=_hit))
    candidates = Candidates(
        best.candidate(score),
        len(found) + len(out),
        lambda: [*(one.candidate(score) for one, score in ranked), *out],
    )
    state = best.state
    return RouteDecision(state.pool, state.name, policy, candidates, best.fits, policy, leaving)


def _bounded(
    states: list[ReplicaState], pools: Mapping[str, PoolTerms]
) -> tuple[list[ReplicaState], list[Candidate]]:
    """Those that may get more, and those that may not: they hold too many of their pool's open attempts.

    Only for replicas whose queue cannot be foretold; one below the bound is left in every pool.
    """
    busy = [state for state in states if state.in_flight >= QUIET and _unforetold(state, pools)]
    if not busy:
        return states, []
    most: dict[str, int] = {}
    for pool in {state.pool for state in busy}:
        loads = [state.in_flight for state in states if state.pool == pool]
        most[pool] = ceil(BOUND * (1 + sum(loads)) / len(loads))
    crowded = {(s.pool, s.name): s for s in busy if s.in_flight >= most[s.pool]}
    return [state for state in states if (state.pool, state.name) not in crowded], [
        Candidate(state.pool, state.name, 0.0, CROWDED, state.hit_tokens) for state in crowded.values()
    ]


def _unforetold(state: ReplicaState, pools: Mapping[str, PoolTerms]) -> bool:
    """Whether nothing tells how long an attempt would wait there, nor that nothing waits."""
    terms, waiting = pools.get(state.pool), state.work.waiting
    if terms is None or terms.speed is None:
        return waiting != 0
    return waiting is None and terms.speed.slots is None


def _decision(
    demand: Demand, found: Sequence[Open], pools: Mapping[str, PoolTerms], out: Sequence[Candidate]
) -> RouteDecision:
    """Our own choice."""
    warm = max(found, key=_hit)
    keys = _keys(found, demand, pools, warm)
    least = min(keys)
    equal = _equal(found, keys, least, demand)
    at = equal[0]
    if len(equal) > 1 and any(found[each].state.pool != found[at].state.pool for each in equal):
        at = _drawn(found, equal, demand)
    home = [] if least[0] == _LATE else _home(found, keys, at)
    if home:  # it is the same whichever of the equal ones is taken, so none needs to be drawn
        hashed = digests(demand.root, [found[one].state for one in home])
        at, reason = max(zip(hashed, home, strict=True))[1], "home"
    else:
        at, reason = _drawn(found, equal, demand), "fastest" if least[0] == _LATE else "least burden"
    best, leaving = found[at], 0
    if best.hit < warm.hit:
        warmest = min(key for key in keys if found[key[-1]].hit == warm.hit)
        leaving = _leaving_nano(best, found[warmest[-1]])
    ranking = _Ranking(found, keys, at, home, demand.root)
    candidates = Candidates(
        best.candidate(-keys[at][4]), len(found) + len(out), lambda: [*ranking.every(), *out]
    )
    return RouteDecision(best.state.pool, best.state.name, CTXGATE, candidates, best.fits, reason, leaving)


def _leaving_nano(best: Open, warmest: Open) -> int:
    """What the attempt costs more than at the replica that holds most of its prompt."""
    if warmest.hit <= best.hit or not best.state.healthy:
        return 0
    if best.cost_nano is None or warmest.cost_nano is None:
        return 0
    return max(best.cost_nano - warmest.cost_nano, 0)


def _keys(found: Sequence[Open], demand: Demand, pools: Mapping[str, PoolTerms], warm: Open) -> list[_Key]:
    """The keys of all open replicas; `warm` is one that holds most of the prompt."""
    budget, fresh, free = demand.budget, demand.fresh, inf
    if not fresh and warm.hit and warm.cost_nano is not None:
        free = warm.cost_nano + demand.credit_nano  # an attempt may cost so much without being charged
    worths = _worth(pools, budget)
    terms, worth, grown = None, _NOTHING, demand.prompt_tokens + demand.output_tokens
    unknown = (budget.prefer is not None, 0)
    keys: list[_Key] = []
    for at, one in enumerate(found):
        cost, total, wait = one.cost_nano, one.total_s, one.wait_s
        rank, late = _FITS, 0.0
        if not one.fits:
            rank = _UNKNOWN if total is None else _LATE
            late = 0.0 if total is None else _late_s(one, budget)
        if one.terms is not terms:
            terms = one.terms
            worth = _NOTHING if terms is None else worths[terms.name]
        if terms is None:
            keys.append((rank, late, True, unknown, 0.0, at))
            continue
        if cost is None:
            keys.append((rank, late, True, worth.aside, one.ttft_s or 0.0, at))
            continue
        burden: float = cost
        aside = _LEVEL
        if total is None or wait is None:
            aside = worth.aside if budget.prefer == "fast" else _LEVEL
        else:
            burden += worth.hurry * total if worth.hurry else worth.wait * wait
            state = one.state
            if state.live_tokens and state.kv_tokens:
                burden += worth.rent * (grown - one.hit) * state.live_tokens / state.kv_tokens
            if fresh and one.used > SAFE and rank == _FITS:
                burden *= 1.0 + RISK * (one.used - SAFE) / (1.0 - SAFE)
        if cost > free:  # what it costs more to leave the warmest replica counts twice, beyond the credit
            burden += cost - free
        keys.append((rank, late, False, aside, burden, at))
    return keys


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
        aside = budget.prefer is not None and terms.profile != budget.prefer, terms.order
        wait = WAIT * seconds[terms.name]
        found[terms.name] = _Worth(hurry, wait, RENT * lost / TOKENS_PER_RATE, aside)
    return found


def _second(terms: PoolTerms) -> float:
    """The price of a second of a replica that prefills, in nano-dollars; 0 where it is not known."""
    if terms.rates is None or terms.speed is None:
        return 0.0
    return terms.rates.uncached / TOKENS_PER_RATE / max(terms.speed.linear_s, 1e-12)


def _equal(found: Sequence[Open], keys: Sequence[_Key], least: _Key, demand: Demand) -> list[int]:
    """Those that are as good as the one of the least key, preferred and as soon as any of them."""
    rank, late, unpriced, aside, burden, at = least
    most = (rank, late, unpriced, aside, max(burden * NEAR, burden), len(found))  # margins may be below zero
    near = [key[-1] for key in keys if key <= most]
    if len(near) == 1:
        return [at]
    prefer = demand.budget.prefer
    if prefer is not None:
        near = [each for each in near if _is(found[each], prefer)] or near
    times = [found[each].ttft_s or 0.0 for each in near]
    soonest = min(times)
    return [each for each, time in zip(near, times, strict=True) if time == soonest]


def _is(one: Open, profile: str) -> bool:
    return one.terms is not None and one.terms.profile == profile


def _drawn(found: Sequence[Open], equal: Sequence[int], demand: Demand) -> int:
    """One of several equal ones, by the request's id."""
    if len(equal) == 1:
        return equal[0]
    drawn = digests(demand.request_id.encode(), [found[each].state for each in equal])
    return min(zip(drawn, equal, strict=True))[1]


def _home(found: Sequence[Open], keys: Sequence[_Key], at: int) -> list[int]:
    """The replicas among which an unknown conversation has its home; none where one knows more of it."""
    best = found[at]
    pool, rank, hit = best.state.pool, keys[at][0], best.hit
    peers: list[tuple[float, int, int]] = []
    for one, key in zip(found, keys, strict=True):
        state = one.state
        if state.pool == pool and key[0] == rank:
            if one.hit != hit:
                return []
            peers.append((key[4], state.in_flight, key[5]))
    most = ceil(BOUND * (1 + sum(in_flight for _, in_flight, _ in peers)) / len(peers))
    if best.ttft_s is None:
        most = max(QUIET, most)
    most_burden = BOUND * min(peers)[0]
    return [each for burden, in_flight, each in peers if burden <= most_burden and in_flight < most]


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
