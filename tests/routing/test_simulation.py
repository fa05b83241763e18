"""Fleet simulations: the same tasks for every policy, counted by the engines, decided by the gateway."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from ctxgate.inference.rates import Rates
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.policies import POLICIES
from ctxgate.routing.simulated_gateway import PoolSetup
from ctxgate.routing.simulated_load import (
    Call,
    Class,
    Shape,
    Task,
    arrivals,
    tasks_per_second,
    uniform,
    work_s,
)
from ctxgate.routing.simulation import Fleet, Simulation
from ctxgate.routing.snapshot import LatencyBudget

RATES = Rates(10**9, 10**8, 4 * 10**9, 10**9, effective=date(2026, 1, 1))  # 1, .1 and 4 dollars per million
PROFILE = PROFILES["standard"]
POOL = PoolSetup("p", "standard", PROFILE, 2, 100_000, RATES)
FLEET = Fleet((POOL,))
ANY = LatencyBudget()
TALK = Shape("talk", "k", "head", 320, (Call(1_000, 10, 0.0), Call(1_500, 20, 5.0), Call(2_100, 30, 5.0)))


def task(number: int, at_s: float, shape: Shape = TALK, budget: LatencyBudget = ANY) -> Task:
    return Task(number, at_s, shape, "k", budget)


def test_the_figures_of_one_task_are_those_worked_out_by_hand() -> None:
    served = Simulation(FLEET, "ctxgate").run([task(0, 1.0)])
    # The prompt before, down to a block of 16: 1000 -> 992, 1500 -> 1488.
    assert [one.cached for one in served] == [0, 992, 1488]
    assert [one.oracle for one in served] == [0, 992, 1488]
    assert [one.expected for one in served] == [0, 992, 1488]
    # Dollars per million tokens are milli-nano per token: 1000 * 1 + 10 * 4 thousand nano.
    assert [one.cost_nano for one in served] == [
        1_040_000,
        508_000 + 99_200 + 80_000,
        612_000 + 148_800 + 120_000,
    ]
    first = 80e-6 * 1000 + 8e-10 * 1000 * 500
    decode = sum(18e-3 + 0.12e-3 + 10e-9 * (1000 + made) for made in range(1, 10))
    assert served[0].ttft_s == pytest.approx(first)
    assert served[0].total_s == pytest.approx(first + decode)
    assert served[1].at_s == pytest.approx(1.0 + first + decode + 5.0)
    assert [one.within for one in served] == [None] * 3


def test_the_head_is_found_by_the_next_task_and_nothing_else_of_it() -> None:
    fleet = one_replica()
    served = Simulation(fleet, "ctxgate").run([task(0, 0.0), task(1, 100.0)])
    assert [one.cached for one in served if one.task == 1] == [320, 992, 1488]
    assert [one.oracle for one in served if one.task == 1] == [320, 992, 1488]


def one_replica(kv_tokens: int = 100_000) -> Fleet:
    return Fleet((PoolSetup("p", "standard", PROFILE, 1, kv_tokens, RATES),))


def test_what_was_evicted_is_neither_found_nor_expected() -> None:
    fleet = one_replica(3_200)
    other = Shape("other", "k", None, 0, (Call(3_000, 10, 0.0),))
    served = Simulation(fleet, "ctxgate").run([task(0, 0.0), task(1, 3.0, other)])
    again = next(one for one in served if one.task == 0 and one.prompt == 1_500)
    assert again.at_s > 3.0
    assert again.oracle == 992
    assert again.cached < 320
    assert again.expected <= 320


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_the_same_requests(policy: str) -> None:
    tasks = [task(number, number * 0.2) for number in range(30)]
    served = Simulation(FLEET, policy).run(tasks)
    assert sorted((one.task, one.prompt) for one in served) == [
        (number, call.prompt_tokens) for number in range(30) for call in TALK.calls
    ]
    assert all(one.pool == "p" and one.cached <= one.oracle for one in served)


def test_an_engine_with_a_full_queue_refuses_and_the_task_ends() -> None:
    slow = replace(PROFILE, max_num_seqs=1)
    fleet = Fleet((PoolSetup("p", "standard", slow, 1, 100_000, RATES),), most_waiting=2)
    budget = LatencyBudget(ttft_us=60_000_000)
    served = Simulation(fleet, "least-load").run([task(n, 0.0, budget=budget) for n in range(5)])
    refused = [one for one in served if one.pool is None]
    # The first is computed, two wait.
    assert [one.task for one in refused] == [3, 4]
    assert all(one.within is False and one.cost_nano == 0 for one in refused)
    assert len(served) == 3 * 3 + 2


def test_a_budget_is_kept_or_missed_by_the_engines_time() -> None:
    # 0.0804 s to the first token.
    tasks = [task(0, 0.0, budget=LatencyBudget(ttft_us=81_000)), task(1, 99.0, budget=LatencyBudget(80_000))]
    first = {one.task: one.within for one in Simulation(FLEET, "random").run(tasks) if one.prompt == 1_000}
    assert first == {0: True, 1: first[1]}
    assert Simulation(FLEET, "random").run([task(0, 0.0, budget=LatencyBudget(80_000))])[0].within is False


def test_arrivals_are_those_of_the_seed_at_the_rate_asked_for() -> None:
    classes = [Class("a", ("k",), 25, ANY), Class("b", ("k",), 75, LatencyBudget(ttft_us=1))]
    found = arrivals([TALK], classes, 2.0, 1000.0, "s")
    assert found == arrivals([TALK], classes, 2.0, 1000.0, "s")
    assert found != arrivals([TALK], classes, 2.0, 1000.0, "t")
    assert 1_776 < len(found) < 2_224  # 2,000 and five standard deviations
    assert 0.2 < sum(one.label == "a" for one in found) / len(found) < 0.3
    with pytest.raises(ValueError, match="no class takes"):
        arrivals([TALK], [Class("a", ("other",), 100, ANY)], 2.0, 10.0, "s")


def test_capacity_is_the_work_of_a_task_with_every_prefix_where_it_is_warm() -> None:
    shape = Shape("one", "k", "head", 200, (Call(1_000, 100, 0.0),))
    # 800 new tokens: 0.064 + 8e-10 * 800 * 600; a token: 18 ms / 64 + 0.12 ms + 10e-9 * 1050.
    expected = 0.064 + 0.000384 + 100 * (0.018 / 64 + 0.00012 + 0.0000105)
    assert work_s(shape, PROFILE, 10**9) == pytest.approx(expected)
    assert tasks_per_second([shape], [(PROFILE, 10**9, 3)]) == pytest.approx(3 / expected)


def test_drawn_numbers_are_even() -> None:
    drawn = [uniform("seed", number) for number in range(4000)]
    assert all(0 <= one < 1 for one in drawn)
    assert abs(sum(drawn) / 4000 - 0.5) < 0.023  # five standard deviations
