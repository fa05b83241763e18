"""What holds for every routing policy, whatever the fleet is like."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.rates import Rates
from ctxgate.routing.choose import BOUND, NEAR, QUIET, RENT, RISK, SAFE, WAIT, choose
from ctxgate.routing.policies import POLICIES
from ctxgate.routing.snapshot import Demand, LatencyBudget, PoolTerms, ReplicaState, Speed, Work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEMAND = Demand(b"root", "request", 2_000, 200, LatencyBudget(ttft_us=1_000_000))
STATES = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 4000), st.integers(0, 90)),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(states=STATES, turn=st.integers(0, 99))
def test_no_policy_takes_one_that_was_tried_or_drains_and_an_unhealthy_one_only_alone(
    policy: str, states: list[tuple[bool, bool, bool, int, int]], turn: int
) -> None:
    fleet = [
        ReplicaState("fast" if at % 2 else "standard", f"r{at}", healthy, load, drains, hit_tokens=hit)
        for at, (healthy, drains, _, hit, load) in enumerate(states)
    ]
    tried = [f"r{at}" for at, state in enumerate(states) if state[2]]
    left = [state for state in fleet if not state.draining and state.name not in tried]
    decision = choose(DEMAND, fleet, {}, tried, policy, turn=turn)
    assert (decision is None) == (not left)
    if decision is not None:
        winner = next(state for state in left if state.name == decision.replica)
        assert winner.healthy or not any(state.healthy for state in left)
        assert sorted(one.replica for one in decision.candidates) == [state.name for state in fleet]
        assert decision.policy == policy


# ---- our own choice, against the rules of its docstring read one by one ------------------------------


@dataclass
class Weighed:
    """One open replica as the rules see it."""

    state: ReplicaState
    terms: PoolTerms | None
    hit: int
    cost: int | None
    wait: float | None
    ttft: float | None
    total: float | None
    fits: bool | None
    used: float
    key: tuple[int, float, bool, tuple[bool, int]] = (0, 0.0, False, (False, 0))
    burden: float = 0.0


def weighed(demand: Demand, state: ReplicaState, pools: Mapping[str, PoolTerms]) -> Weighed:
    terms, budget, length = pools.get(state.pool), demand.budget, demand.prompt_tokens
    hit, output = max(min(state.hit_tokens, length - 1), 0), demand.output_tokens
    one = Weighed(state, terms, hit, None, None, None, None, None if budget.bounds else True, 0.0)
    if terms is not None and (rates := terms.rates) is not None:
        parts = ((length - hit) * rates.uncached, hit * rates.cached, output * rates.output)
        one.cost = sum((part + 500_000) // 1_000_000 for part in parts)
    if terms is not None and (speed := terms.speed) is not None:
        work = state.work
        sequences = max(state.in_flight, (work.running or 0) + (work.waiting or 0))
        slot = speed.slot_s(output, length, work, sequences)
        one.wait = speed.queue_s(work) + slot
        one.ttft = speed.ttft_s(length - hit, length, work) + slot
        one.total = one.ttft + max(output - 1, 0) * speed.itl_s(length, work)
        bounds = ((one.ttft, budget.ttft_us), (one.total, budget.total_us))
        shares = [seconds * 1e6 / (us or 1) for seconds, us in bounds if us is not None]
        if shares:
            one.used = max(shares)
            one.fits = one.used <= 1.0
    return one


def second_nano(terms: PoolTerms) -> float:
    if terms.rates is None or terms.speed is None:
        return 0.0
    return terms.rates.uncached / 1_000_000 / max(terms.speed.linear_s, 1e-12)


def give_key(one: Weighed, demand: Demand, pools: Mapping[str, PoolTerms], warm: Weighed) -> None:
    budget, terms = demand.budget, one.terms
    rank = 0 if one.fits else 1 if one.total is None else 2
    over = [
        seconds - us / 1e6
        for seconds, us in ((one.ttft, budget.ttft_us), (one.total, budget.total_us))
        if us is not None and seconds is not None
    ]
    late = max(over) if rank == 2 else 0.0
    aside = (budget.prefer is not None, 0)
    if terms is not None:
        aside = (budget.prefer is not None and terms.profile != budget.prefer, terms.order)
    if terms is None or one.cost is None:
        one.key, one.burden = (rank, late, True, aside), 0.0 if terms is None else one.ttft or 0.0
        return
    timed = one.wait is not None and one.total is not None
    one.key = rank, late, False, aside if not timed and budget.prefer == "fast" else (False, 0)
    one.burden = one.cost
    if one.wait is not None and one.total is not None:
        hurry = max(second_nano(each) for each in pools.values())
        if budget.prefer == "fast" and not budget.bounds and hurry:
            one.burden += hurry * one.total
        else:
            one.burden += WAIT * second_nano(terms) * one.wait
        state, rates = one.state, terms.rates
        if state.kv_tokens and rates is not None:
            lost = RENT * max(rates.uncached - rates.cached, 0) / 1_000_000
            kept = demand.prompt_tokens - one.hit + demand.output_tokens
            one.burden += lost * kept * state.live_tokens / state.kv_tokens
        if demand.fresh and rank == 0 and one.used > SAFE:
            one.burden *= 1.0 + RISK * (one.used - SAFE) / (1.0 - SAFE)
    if not demand.fresh and warm.hit and warm.cost is not None:
        one.burden += max(one.cost - (warm.cost + demand.credit_nano), 0)


def hashed(one: Weighed, key: bytes) -> bytes:
    return blake2b(f"{one.state.pool}\0{one.state.name}".encode(), key=key, digest_size=8).digest()


def crowded(state: ReplicaState, among: Sequence[ReplicaState], pools: Mapping[str, PoolTerms]) -> bool:
    terms, waiting = pools.get(state.pool), state.work.waiting
    if terms is not None and terms.speed is not None and (terms.speed.slots is not None or waiting):
        return False
    loads = [one.in_flight for one in among if one.pool == state.pool]
    most = max(QUIET, ceil(BOUND * (1 + sum(loads)) / len(loads)))
    return waiting != 0 and state.in_flight >= most


def ranked(
    demand: Demand, states: Sequence[ReplicaState], pools: Mapping[str, PoolTerms]
) -> tuple[list[Weighed], str]:
    """All that may be chosen, best first, and why."""
    healthy = [state for state in states if state.healthy] or states
    found = [weighed(demand, state, pools) for state in healthy if not crowded(state, healthy, pools)]
    warm = max(found, key=lambda one: one.hit)
    for one in found:
        give_key(one, demand, pools, warm)
    found.sort(key=lambda one: (one.key, one.burden))
    least = found[0]
    most = (least.key, max(least.burden * NEAR, least.burden))
    near = [one for one in found if (one.key, one.burden) <= most]
    prefer, id_ = demand.budget.prefer, demand.request_id.encode()

    def order(one: Weighed) -> tuple[bool, float, bytes]:
        other = prefer is not None and (one.terms is None or one.terms.profile != prefer)
        return other, one.ttft or 0.0, hashed(one, id_)

    best = min(near, key=order)
    front, reason = [best], "fastest" if best.key[0] == 2 else "least burden"
    peers = [one for one in found if one.state.pool == best.state.pool and one.key[0] == best.key[0]]
    if best.key[0] != 2 and all(one.hit == best.hit for one in peers):
        full = ceil(BOUND * (1 + sum(one.state.in_flight for one in peers)) / len(peers))
        if best.ttft is None:
            full = max(full, QUIET)
        dearest = BOUND * min(one.burden for one in peers)
        home = [one for one in peers if one.burden <= dearest and one.state.in_flight < full]
        if home:
            front = sorted(home, key=lambda one: hashed(one, demand.root), reverse=True)
            reason = "home"
    return [*front, *(one for one in found if not any(one is each for each in front))], reason


SPEEDS = st.builds(
    Speed,
    st.sampled_from([1e-6, 8e-5]),
    st.sampled_from([0.0, 8e-10]),
    st.sampled_from([0.001, 0.018]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([0.0, 1e-8]),
    base_s=st.sampled_from([0.0, 0.05]),
    rho_s=st.sampled_from([0.0, 0.1, -0.3]),
    slots=st.sampled_from([None, 2, 16]),
    rho_share=st.sampled_from([0.0, 0.2]),
)
RATES = st.builds(
    Rates,
    st.sampled_from([10**9, 6 * 10**8]),
    st.sampled_from([0, 10**8]),
    st.just(4 * 10**9),
    st.just(10**9),
    st.just(date(2026, 1, 1)),
)
TERMS = st.tuples(
    st.sampled_from(["fast", "standard", None]), st.none() | RATES | RATES, st.none() | SPEEDS | SPEEDS
)
WORKS = st.builds(
    Work,
    st.sampled_from([0, 500, 90_000]),
    st.integers(0, 3),
    st.sampled_from([0, 40_000]),
    st.sampled_from([0, 10**8]),
    running=st.none() | st.integers(0, 20),
    waiting=st.none() | st.integers(0, 2),
)
FLEETS = st.lists(
    st.tuples(
        st.sampled_from(["one", "two", "untold"]),
        st.sampled_from([True, True, True, False]),
        st.integers(0, 4) | st.sampled_from([7, 8, 9, 12, 40]),
        WORKS | st.just(Work()),
        st.sampled_from([None, 4_000_000]),
        st.sampled_from([0, 0, 1_600, 9_000, 5_000_000]),
        st.sampled_from([0, 300_000]),
    ),
    min_size=1,
    max_size=9,
)
DEMANDS = st.builds(
    Demand,
    st.sampled_from([b"root", b"another"]),
    st.sampled_from(["request", "another"]),
    st.sampled_from([0, 1, 2_000, 1_000_000]),
    st.sampled_from([0, 1, 200]),
    st.builds(
        LatencyBudget,
        st.sampled_from([None, 0, 1_000_000, 15_000_000]),
        st.sampled_from([None, None, 20_000_000]),
        st.sampled_from([None, "fast", "standard"]),
    ),
    st.sampled_from([0, 10**6]),
    fresh=st.booleans(),
)


@given(demand=DEMANDS, fleet=FLEETS, terms=st.lists(TERMS, min_size=2, max_size=2))
def test_our_choice_and_all_its_scores_are_those_of_the_rules_read_one_by_one(
    demand: Demand,
    fleet: list[tuple[str, bool, int, Work, int | None, int, int]],
    terms: list[tuple[str | None, Rates | None, Speed | None]],
) -> None:
    names = ("one", "two")
    pools = {
        name: PoolTerms(name, at, *told)  # type: ignore[arg-type]  # the profiles are among those that there are
        for at, (name, told) in enumerate(zip(names, terms, strict=True))
    }
    states = [
        ReplicaState(pool, f"r{at}", healthy, load, False, work, kv, hit, live_tokens=live)
        for at, (pool, healthy, load, work, kv, hit, live) in enumerate(fleet)
    ]
    expected, reason = ranked(demand, states, pools)
    decision = choose(demand, states, pools)
    assert decision is not None
    best = expected[0]
    assert (decision.replica, decision.fits, decision.reason) == (best.state.name, best.fits, reason)
    chosen = decision.candidates[: len(expected)]
    assert [
        (one.replica, one.hit_tokens, one.ttft_s, one.total_s, one.cost_nano, one.fits, one.score)
        for one in chosen
    ] == [(one.state.name, one.hit, one.ttft, one.total, one.cost, one.fits, -one.burden) for one in expected]
    assert decision.candidates[0] == chosen[0]
    assert len(decision.candidates) == len(states)
    open_ones = [one for one in expected if one.state.healthy]
    warmest = max(open_ones, key=lambda one: one.hit, default=best)
    leaving = 0
    if warmest.hit > best.hit and best.cost is not None and warmest.cost is not None:
        leaving = max(best.cost - warmest.cost, 0)
    assert decision.leaving_nano == leaving
