"""The choice: the budget first, then the burden; affinity and balance for each replica alone."""

from __future__ import annotations

from collections import Counter
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from ctxgate.inference.rates import Rates
from ctxgate.routing.choose import choose, rendezvous, rendezvous_score
from ctxgate.routing.snapshot import Demand, LatencyBudget, PoolTerms, ReplicaState, Speed, Work

if TYPE_CHECKING:
    from ctxgate.routing.snapshot import Profile

PER_MILLION = 10**9  # nano-dollars of a rate of one dollar
STANDARD_SPEED = Speed(80e-6, 8e-10, 18e-3, 0.12e-3, 1e-8, slots=64)
FAST_SPEED = Speed(25e-6, 2.5e-10, 7e-3, 0.15e-3, 4e-9, slots=16)


def rates(uncached: float, cached: float, output: float) -> Rates:
    """Dollars per million tokens."""
    nano = [int(each * PER_MILLION) for each in (uncached, cached, output)]
    return Rates(nano[0], nano[1], nano[2], nano[0], effective=date(2026, 1, 1))


STANDARD = PoolTerms("standard", 0, "standard", rates(0.5, 0.05, 2), STANDARD_SPEED)
FAST = PoolTerms("fast", 1, "fast", rates(1, 0.1, 4), FAST_SPEED)
POOLS = {"standard": STANDARD, "fast": FAST}
INTERACTIVE = LatencyBudget(ttft_us=1_000_000, prefer="fast")


def ask(prompt: int = 2_000, output: int = 200, request: str = "r", **more: Any) -> Demand:
    """A demand of a conversation that has a name."""
    fields: dict[str, Any] = {"root": b"root", "budget": LatencyBudget()} | more
    return Demand(request_id=request, prompt_tokens=prompt, output_tokens=output, **fields)


def replica(name: str, hit: int = 0, pool: str = "standard", **more: Any) -> ReplicaState:
    """A healthy replica."""
    fields: dict[str, Any] = {"healthy": True, "in_flight": 0} | more
    return ReplicaState(pool, name, hit_tokens=hit, **fields)


def queued(tokens: int) -> dict[str, Any]:
    """So many tokens of one attempt wait there."""
    return {"in_flight": 1, "work": Work(prefill_tokens=tokens)}


def chosen(demand: Demand, snapshot: list[ReplicaState], pools: Any = None, tried: Any = ()) -> str:
    """The name of the chosen replica."""
    decision = choose(demand, snapshot, POOLS if pools is None else pools, tried)
    assert decision is not None
    assert len(decision.candidates) == len(snapshot)
    return decision.replica


# ---- the budget ------------------------------------------------------------------------------------------


def test_a_long_warm_turn_goes_to_the_standard_pool_and_a_short_new_one_to_the_fast_pool() -> None:
    # 9,000 new tokens of 900,000: 0.72 s + 8e-10 * 9000 * 895500 = 6.45 s. Cold on the fast pool:
    # 22.5 s + 2.5e-10 * 900000 * 450000 = 101 s.
    hurry = LatencyBudget(prefer="fast")
    fleet = [replica("s", 891_000), replica("f", pool="fast")]
    assert chosen(ask(900_000, budget=hurry), fleet) == "s"
    assert chosen(ask(2_000, budget=hurry, fresh=True), [replica("s"), replica("f", pool="fast")]) == "f"


def test_the_cheapest_replica_that_fits_is_chosen_and_the_next_pool_where_it_does_not() -> None:
    # 8,000 tokens: 0.64 s + 8e-10 * 8000 * 4000 = 0.67 s on standard; 20,000: 1.76 s, on fast 0.55 s.
    fleet = [replica("s"), replica("f", pool="fast")]
    assert chosen(ask(8_000, budget=replace(INTERACTIVE, ttft_us=3_000_000)), fleet) == "s"
    assert chosen(ask(20_000, budget=INTERACTIVE), fleet) == "f"


def test_the_bound_on_the_whole_answer_counts_too() -> None:
    # 500 tokens at 18.1 ms are 9.1 s on standard, at 7.2 ms 3.6 s on fast.
    fleet = [replica("s"), replica("f", pool="fast")]
    assert chosen(ask(1_000, 500, budget=LatencyBudget(total_us=60_000_000)), fleet) == "s"
    assert chosen(ask(1_000, 500, budget=LatencyBudget(total_us=5_000_000)), fleet) == "f"


def test_where_none_fits_the_fastest_is_chosen_and_said_so() -> None:
    fleet = [replica("s"), replica("f", pool="fast")]
    decision = choose(ask(400_000, budget=INTERACTIVE), fleet, POOLS)
    assert decision is not None
    assert (decision.replica, decision.fits, decision.reason) == ("f", False, "fastest")
    assert {one.fits for one in decision.candidates} == {False}


def test_a_spent_budget_is_no_error() -> None:
    assert chosen(ask(budget=LatencyBudget(ttft_us=0)), [replica("s"), replica("f", pool="fast")]) == "f"


def test_routing_f2_an_unknown_time_is_not_a_default_one() -> None:
    pools = {"standard": replace(STANDARD, speed=None), "fast": FAST}
    fleet = [replica("s"), replica("f", pool="fast")]
    decision = choose(ask(8_000, budget=INTERACTIVE), fleet, pools)
    assert decision is not None
    assert (decision.replica, decision.fits) == ("f", True)  # it is known to fit
    explored = choose(ask(400_000, budget=INTERACTIVE), fleet, pools)
    assert explored is not None
    assert (explored.replica, explored.fits) == ("s", None)  # it may fit, and the other one does not
    assert explored.candidates[0].ttft_s is None


def test_routing_f8_the_price_is_that_of_the_expected_hit_not_of_the_list() -> None:
    # 100,000 tokens, 90,000 of them warm at either: 2,200 + 630 = 2,830,000 nano against 800 + 1,440.
    dear = replace(STANDARD, rates=rates(0.22, 0.007, 0))
    cheap = PoolTerms("fast", 1, None, rates(0.08, 0.016, 0), STANDARD_SPEED)
    fleet = [replica("s", 90_000), replica("f", 90_000, pool="fast")]
    decision = choose(ask(100_000), fleet, {"standard": dear, "fast": cheap})
    assert decision is not None
    assert [one.cost_nano for one in decision.candidates] == [2_240_000, 2_830_000]
    # With 99,000 warm the cached rate decides: 220,000 + 693,000 against 80,000 + 1,584,000.
    assert chosen(ask(100_000), [replica("s", 99_000), replica("f", 99_000, pool="fast")],
                  {"standard": dear, "fast": cheap}) == "s"  # fmt: skip


# ---- affinity and balance --------------------------------------------------------------------------------


def test_a_conversation_stays_where_it_is_warm_while_waiting_costs_less_than_leaving() -> None:
    # Leaving costs 90,000 * 0.45 $ per million, twice without credit; a waiting token costs 0.4 $.
    warm = 90_000
    fleet = [replica("a", warm, **queued(150_000)), replica("b")]
    assert chosen(ask(100_000), fleet) == "a"
    assert chosen(ask(100_000), [replica("a", warm, **queued(400_000)), replica("b")]) == "b"


def test_credit_pays_for_leaving_once() -> None:
    # 40,500,000 nano to leave; 150,000 waiting tokens cost 60,000,000.
    fleet = [replica("a", 90_000, **queued(150_000)), replica("b")]
    assert chosen(ask(100_000), fleet) == "a"
    assert chosen(ask(100_000, credit_nano=40_500_000), fleet) == "b"


def test_routing_a8_a_burst_of_one_cold_prefix_follows_the_first_until_its_queue_costs_more() -> None:
    # Each waiting copy has 20,000 cached and 50 own tokens.
    def burst(own: int, hit: int = 20_000) -> list[ReplicaState]:
        work = Work(prefill_tokens=hit + own)
        return [replica("a", hit, in_flight=1, work=work), *(replica(name) for name in "bcd")]

    assert chosen(ask(20_050, fresh=True), burst(29 * 50)) == "a"
    assert chosen(ask(20_050, fresh=True), burst(40_000)) != "a"


def test_routing_b1_a_miss_goes_by_load_not_to_the_replica_that_knows_least() -> None:
    stuck = replica("stuck", in_flight=40, work=Work(prefill_tokens=200_000), live_tokens=0, kv_tokens=10**6)
    busy = [
        replica(name, in_flight=3, work=Work(decoding=3), live_tokens=10**5, kv_tokens=10**6)
        for name in "abc"
    ]
    for number in range(50):
        assert chosen(ask(4_000, root=b"%d" % number, fresh=True), [stuck, *busy]) != "stuck"


def test_routing_b3_one_overrun_replica_keeps_no_other_from_its_conversations() -> None:
    hot = replica("hot", in_flight=500, work=Work(prefill_tokens=10**6))
    others = [replica(f"n{number}", 50_000 if number == 7 else 0) for number in range(15)]
    assert chosen(ask(51_000), [hot, *others]) == "n7"


def test_routing_b4_the_home_of_an_unknown_conversation_is_bounded_by_load() -> None:
    names = ("a", "b", "c", "d")
    root = next(b"%d" % n for n in range(99) if _home(b"%d" % n, names) == "a")
    quiet = [replica(name) for name in names]
    assert chosen(ask(root=root), quiet) == "a"
    loaded = [replica("a", in_flight=20, work=Work(prefill_tokens=30_000)), *quiet[1:]]
    assert chosen(ask(root=root), loaded) != "a"


def _home(root: bytes, names: tuple[str, ...]) -> str:
    return max(names, key=lambda name: rendezvous_score(root, "standard", name))


@pytest.mark.parametrize("speed", [replace(STANDARD_SPEED, slots=None), None])
def test_a_hot_prefix_does_not_pile_up_where_neither_load_nor_slots_are_known(speed: Speed | None) -> None:
    # 101 attempts of one warm prompt that none of them ends: 1.25 * 101 / 4 = 31.6, so at most 32 at one.
    pools = {"standard": replace(STANDARD, speed=speed)}
    loads = dict.fromkeys("abcd", 0)
    for number in range(101):
        fleet = [replica(name, 9_900 if loads[name] else 0, in_flight=loads[name]) for name in loads]
        loads[chosen(ask(10_000, request=str(number)), fleet, pools)] += 1
        if number == 7:  # so few are no crowd: they stay together
            assert sorted(loads.values()) == [0, 0, 0, 8]
    assert max(loads.values()) <= 32
    assert sum(loads.values()) == 101


def test_a_crowded_replica_is_out_and_an_engine_that_tells_of_its_load_is_not() -> None:
    # 1.25 * (1 + 40) / 2 = 25.6: 26 may be at one. "a" holds the prompt, "b" does not.
    pools = {"standard": replace(STANDARD, speed=replace(STANDARD_SPEED, slots=None))}
    fleet = [replica("a", 9_900, in_flight=40), replica("b")]
    decision = choose(ask(10_000), fleet, pools)
    assert decision is not None
    assert (decision.replica, decision.leaving_nano) == ("b", 0)
    assert [(one.replica, one.excluded) for one in decision.candidates] == [("b", None), ("a", "crowded")]
    assert chosen(ask(10_000), [replica("a", 9_900, in_flight=25), replica("b", in_flight=15)], pools) == "a"
    told = replica("a", 9_900, in_flight=40, work=Work(running=40, waiting=0))
    assert chosen(ask(10_000), [told, replica("b")], pools) == "a"
    assert chosen(ask(10_000), fleet[:1], pools) == "a"  # the only one there is
    slots = {"standard": STANDARD}  # 40 of 64: nothing waits
    assert chosen(ask(10_000), fleet, slots) == "a"


def test_routing_b6_b10_a_shared_system_prompt_is_replicated_under_load() -> None:
    """100 users, 4,000 tokens of shared prompt and 200 of their own, 4 replicas that remember and work."""
    known: dict[str, int] = {}
    waiting: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for user in range(100):
        fleet = [
            replica(name, known.get(name, 0), in_flight=taken[name], work=Work(prefill_tokens=waiting[name]))
            for name in "abcd"
        ]
        name = chosen(ask(4_200, root=b"%d" % user, request=str(user), fresh=True), fleet)
        waiting[name] += 4_200 - known.get(name, 0)
        known[name] = 4_000
        taken[name] += 1
    assert set(taken) == set("abcd")
    assert max(taken.values()) <= 40


def test_routing_b7_the_replica_that_holds_the_prefix_is_left_when_it_is_too_busy() -> None:
    """200 tokens of 4,200 are new where it is warm: waiting for 3,500 costs less than the other 4,000."""

    def warm(waiting: int) -> list[ReplicaState]:
        return [replica("warm", 4_000, **queued(waiting)), *(replica(name) for name in "abc")]

    assert chosen(ask(4_200, fresh=True), warm(3_500)) == "warm"
    assert chosen(ask(4_200, fresh=True), warm(40_000)) != "warm"


def test_routing_b12_the_benefit_of_a_prefix_comes_from_the_measured_speed() -> None:
    """The same hit and queue: where prefill is slow the queue is too long for the budget, else it is not."""
    fleet = [replica("a", 19_000, **queued(30_000)), replica("b")]
    budget = LatencyBudget(ttft_us=2_500_000)  # behind 30,000 * 80 us: 2.69 s at a, cold 1.95 s at b
    assert chosen(ask(22_000, budget=budget), fleet) == "b"
    quick = {"standard": replace(STANDARD, speed=FAST_SPEED)}
    assert chosen(ask(22_000, budget=budget), fleet, quick) == "a"


def test_a_new_conversation_avoids_a_cache_full_of_others_that_go_on() -> None:
    full = replica("full", kv_tokens=10**6, live_tokens=900_000)
    for number in range(20):
        fleet = [full, replica("free", kv_tokens=10**6, live_tokens=100_000)]
        assert chosen(ask(root=b"%d" % number, fresh=True), fleet) == "free"


def test_a_wait_for_a_slot_counts() -> None:
    # 16 slots, 40 in flight: 25 answers of 200 tokens before one's turn, 25 / 16 * 200 * 9.7 ms = 3 s.
    crowd = replica("crowd", 1_000, pool="fast", in_flight=40, work=Work(decoding=16))
    decision = choose(ask(2_000, budget=INTERACTIVE), [crowd, replica("s")], POOLS)
    assert decision is not None
    assert decision.replica == "s"
    late = next(one for one in decision.candidates if one.replica == "crowd")
    assert late.ttft_s == pytest.approx(
        25 / 16 * 200 * (7e-3 + 17 * 0.15e-3 + 2000 * 4e-9) + 0.0254, abs=1e-3
    )
    assert late.fits is False


def test_an_engine_that_runs_more_than_its_slots_has_as_many() -> None:
    """40 run where 8 slots were said: one more waits for one in 40 answers of 100 tokens to end."""
    speed = replace(STANDARD_SPEED, slots=8)
    work = Work(running=40, waiting=0)
    assert speed.slot_s(100, 1000, work, 39) == 0.0
    assert speed.slot_s(100, 1000, work, 40) == pytest.approx(100 / 40 * speed.itl_s(1000, work))
    assert speed.slot_s(100, 1000, Work(), 8) == pytest.approx(100 / 8 * speed.itl_s(1000, Work()))


def test_where_slots_are_not_known_an_engine_with_requests_that_wait_is_full() -> None:
    """Ten run and ninety wait: of the 100 answers ahead some ten must end, each 200 steps of 18 ms."""
    terms = {"standard": replace(STANDARD, speed=replace(STANDARD_SPEED, slots=None))}
    full = Work(decoding=100, running=10, waiting=90)
    snapshot = [replica("warm", hit=1_900, in_flight=100, work=full), replica("idle", work=Work(running=0))]
    demand = ask(budget=LatencyBudget(prefer="standard"), fresh=True)
    assert chosen(demand, snapshot, terms) == "idle"
    decision = choose(demand, snapshot, terms)
    assert decision is not None
    (warm,) = (one for one in decision.candidates if one.replica == "warm")
    assert warm.ttft_s is not None
    assert warm.ttft_s > 9.1 * 200 * 18e-3
    busy = replace(snapshot[0], work=replace(full, waiting=0))
    assert chosen(demand, [busy, snapshot[1]], terms) == "warm"


def test_requests_that_wait_count_also_where_an_engine_does_not_tell_how_many_run() -> None:
    # One runs at least where one waits: the answer of one, 200 tokens of 18.12 ms, ends first.
    pools = {"standard": replace(STANDARD, speed=replace(STANDARD_SPEED, slots=None))}
    told = replica("a", work=Work(waiting=1))
    decision = choose(ask(0, 200), [told, replica("b", in_flight=5)], pools)
    assert decision is not None
    assert decision.replica == "b"
    assert decision.candidates[1].ttft_s == pytest.approx(200 * (18e-3 + 0.12e-3))


def test_a_margin_below_zero_leaves_the_choice_as_it_is() -> None:
    """Times were much shorter than predicted: nothing is predicted to be there before it was asked for."""
    hasty = replace(STANDARD_SPEED, rho_s=-16.0, rho_share=-800.0, itl_rho_s=-1.0)
    snapshot = [replica("a"), replica("b")]
    for terms in (replace(STANDARD, speed=hasty), replace(STANDARD, speed=hasty, rates=None)):
        for budget in (LatencyBudget(), INTERACTIVE, LatencyBudget(prefer="fast")):
            decision = choose(ask(budget=budget), snapshot, {"standard": terms})
            assert decision is not None
            assert all(one.ttft_s == 0.0 for one in decision.candidates)


def test_where_a_conversation_begins_it_leaves_nothing_and_takes_no_risk() -> None:
    # 4,000 of 5,000 tokens belong to a head that others share; 20,000 waiting tokens take 1.6 of 3 s.
    fleet = [replica("a", 4_000, **queued(20_000)), replica("b")]
    budget = LatencyBudget(ttft_us=3_000_000)
    assert chosen(ask(5_000, budget=budget, fresh=True), fleet) == "b"
    # One that has begun stays: 5,000 waiting tokens cost 2,000,000 nano, leaving 2 * 1,800,000.
    fleet = [replica("a", 4_000, **queued(5_000)), replica("b")]
    assert chosen(ask(5_000, budget=budget), fleet) == "a"
    assert chosen(ask(5_000, budget=budget, fresh=True), fleet) == "b"


# ---- preference and ties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefer", ["fast", "standard"])
def test_without_prices_the_preferred_profile_decides_and_without_a_preference_the_first_pool(
    prefer: Profile,
) -> None:
    pools = {name: replace(terms, rates=None, speed=None) for name, terms in POOLS.items()}
    fleet = [replica("f", pool="fast"), replica("s")]
    assert chosen(ask(budget=LatencyBudget(prefer=prefer)), fleet, pools) == prefer[0]
    assert chosen(ask(), fleet, pools) == "s"


def test_a_preference_breaks_a_near_tie_of_price() -> None:
    near = replace(FAST, rates=rates(0.505, 0.0505, 2.02))
    fleet = [replica("s"), replica("f", pool="fast")]
    pools = {"standard": STANDARD, "fast": near}
    assert chosen(ask(budget=LatencyBudget(ttft_us=10**9, prefer="fast")), fleet, pools) == "f"
    assert chosen(ask(budget=LatencyBudget(ttft_us=10**9, prefer="standard")), fleet, pools) == "s"


def test_ties_of_warm_replicas_are_broken_by_the_request() -> None:
    # Equal hits at a and b, none at c: nobody's home.
    fleet = [replica("a", 1_000), replica("b", 1_000), replica("c")]
    found = Counter(chosen(ask(request=str(number)), fleet) for number in range(200))
    assert set(found) == {"a", "b"}
    assert min(found.values()) > 60  # five standard deviations are 35


def test_an_unknown_conversation_has_the_same_home_in_every_process() -> None:
    names = tuple("abcdefgh")
    for number in range(40):
        root = b"%d" % number
        fleet = [replica(name) for name in names]
        unpriced = {"standard": replace(STANDARD, rates=None, speed=None)}
        assert chosen(ask(root=root, request=f"x{number}"), fleet) == _home(root, names)
        assert chosen(ask(root=root), fleet[::-1], unpriced) == _home(root, names)
        told = rendezvous(root, fleet)
        assert told is not None
        assert chosen(ask(root=root), fleet, {}) == told.replica


# ---- who may be chosen -----------------------------------------------------------------------------------


def test_the_reasons_of_the_losers_are_told() -> None:
    fleet = [
        replica("a"),
        replica("b", healthy=False),
        replica("c"),
        replica("d", draining=True),
    ]
    decision = choose(ask(), fleet, POOLS, ["c"])
    assert decision is not None
    assert {one.replica: one.excluded for one in decision.candidates} == {
        "a": None,
        "b": "unhealthy",
        "c": "tried",
        "d": "draining",
    }
    assert decision.candidates[0].replica == "a"


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        choose(ask(), [replica("a")], POOLS, (), "newest")
