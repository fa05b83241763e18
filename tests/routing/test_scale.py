"""How many replicas a pool needs: against figures worked out by hand."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.scale import MOST, Arrival, Arrivals, Load, wanted
from ctxgate.routing.snapshot import Speed

SPEED = Speed(linear_s=1e-4, attention_s=0.0, step_s=0.02, sequence_s=1e-4, context_s=0.0, slots=64)


def test_nothing_comes_nothing_is_wanted() -> None:
    assert wanted(Load(), (), SPEED) == 0


def test_without_budgets_a_replica_may_be_busy_four_fifths_of_its_time() -> None:
    assert wanted(Load(prefill_s=0.8, prefill_s2=0.8), (), SPEED) == 1
    assert wanted(Load(prefill_s=0.81, prefill_s2=0.8), (), SPEED) == 2
    assert wanted(Load(prefill_s=8.1, prefill_s2=0.8), (), SPEED) == 11


def test_tighter_budgets_want_more_replicas() -> None:
    # Prefills of 1 s, 3 a second: rest 0.5 s. With n replicas busy = 3/n, as in the module's formula.
    load = Load(prefill_s=3.0, prefill_s2=3.0)

    def late(replicas: int, slack: float) -> float:
        return 3 / replicas * exp(-slack * (1 - 3 / replicas) / 0.5)

    assert late(8, 1.0) > 0.1 >= late(9, 1.0)
    for slack in (0.2, 1.0, 5.0):
        first = next(n for n in range(4, 100) if late(n, slack) <= 0.1)
        assert wanted(load, [slack], SPEED) == first
    assert wanted(load, [0.0], SPEED) == 30  # no wait at all: one in ten may find it busy


def test_who_is_late_without_a_wait_asks_for_no_replica() -> None:
    load = Load(prefill_s=3.0, prefill_s2=3.0)
    assert wanted(load, [-1.0, -2.0], SPEED) == wanted(load, [], SPEED) == 4
    assert wanted(load, [-1.0, 1.0], SPEED) == wanted(load, [1.0], SPEED)


def test_sequences_that_decode_at_once_need_slots() -> None:
    # 3,200 tokens a second on n replicas: x = 3200/n each; busy = x 1e-4; at once x 0.02 / (1 - busy) <= 64.
    load = Load(output_tokens=3200.0, context=1000.0)
    first = next(n for n in range(1, 10) if 3200 / n * 0.02 / (1 - 3200 / n * 1e-4) <= 64)
    assert first == 2
    assert wanted(load, (), SPEED) == 2


def test_what_no_number_can_carry_ends_at_the_bound() -> None:
    assert wanted(Load(prefill_s=1e9, prefill_s2=1e9), (), SPEED) == MOST


def test_a_steady_stream_is_its_rate_and_fades_when_it_ends() -> None:
    arrivals = Arrivals(memory_s=60.0)
    for second in range(600):
        arrivals.add(Arrival(second * 1_000_000, 0.5, 100, 2000, slack_s=1.0))
    load = arrivals.load(599_000_000)
    assert load.prefill_s == pytest.approx(0.5, rel=0.02)
    assert load.prefill_s2 == pytest.approx(0.25, rel=0.02)
    assert load.output_tokens == pytest.approx(100, rel=0.02)
    assert load.context == pytest.approx(2000)
    faded = arrivals.load(599_000_000 + int(60e6 * log(2)))
    assert faded.prefill_s == pytest.approx(load.prefill_s / 2, rel=1e-3)


def test_a_pool_that_has_just_begun_is_judged_by_the_time_it_has_run() -> None:
    arrivals = Arrivals(memory_s=60.0)
    for tenth in range(100):
        arrivals.add(Arrival(tenth * 100_000, 0.1, 10, 100))
    assert arrivals.load(9_900_000).prefill_s == pytest.approx(1.0, rel=0.03)


@given(
    prefill=st.floats(0.01, 50),
    spread=st.floats(1, 20),
    output=st.floats(0, 5000),
    slacks=st.lists(st.floats(-5, 30), max_size=20),
    factor=st.floats(1, 3),
)
def test_more_load_never_wants_fewer(
    prefill: float, spread: float, output: float, slacks: list[float], factor: float
) -> None:
    light = Load(prefill, prefill * spread, output, 1000.0)
    heavy = Load(prefill * factor, prefill * spread * factor, output * factor, 1000.0)
    assert wanted(heavy, slacks, SPEED) >= wanted(light, slacks, SPEED) >= 1
