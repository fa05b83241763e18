"""What holds of every decision when to compact, and of every session played under a policy."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxgate.compression.economics import Shape, overhead
from ctxgate.compression.schedule import Step, never, optimum, shipped, simulate, ski_rental
from ctxgate.compression.serving_cost import Latency, Speed
from ctxgate.compression.window import (
    KEEP,
    Compact,
    Conversation,
    Decision,
    Limits,
    Reason,
    Terms,
    begin,
    compacted,
    decide,
    edited,
    observed,
)
from ctxgate.compression.window_errors import read_overflow
from ctxgate.inference.rates import Rates
from support.compaction import PRICES, SHAPE

if TYPE_CHECKING:
    from ctxgate.compression.schedule import Outcome

# Generated sessions, played whole.
pytestmark = pytest.mark.integration

DAY = date(2026, 11, 30)
TAIL = 60


@st.composite
def rates(draw: st.DrawFn, *, plain: bool = False) -> Rates:
    """Rates with c <= w; `plain`: writing costs no more than reading."""
    cached = draw(st.integers(1, 100))
    written = cached if plain else cached + draw(st.integers(0, 400))
    return Rates(written, cached, draw(st.integers(0, 500)), written, DAY)


shapes = st.builds(
    Shape,
    prefix=st.integers(0, 50),
    summary=st.integers(0, 20),
    tail=st.just(TAIL),
    summary_output=st.integers(0, 30),
    instruction=st.just(0),
    damage_nano=st.just(0),
)
growths = st.lists(st.integers(0, TAIL), max_size=40)
limits = st.builds(
    Limits,
    window=st.none() | st.integers(2, 4_000),
    largest_output=st.integers(0, 500),
    worst_batch=st.integers(0, 500),
    summary_call=st.integers(0, 100),
    tier_edge=st.none() | st.integers(1, 3_000),
    margin=st.integers(0, 50),
)
budgets = st.none() | st.builds(
    Latency,
    st.builds(Speed, *[st.integers(0, 10**12)] * 4),
    first_ms=st.none() | st.integers(0, 2_000),
    between_ms=st.none() | st.integers(0, 2_000),
    whole_ms=st.none() | st.integers(0, 20_000),
    output=st.integers(0, 50),
)
factors = st.fractions(Fraction(1, 20), 1, max_denominator=20)
every_terms = st.builds(Terms, rates(), shapes, limits, budgets, factors)
prompts = st.lists(st.tuples(st.integers(0, 3_000), st.none() | st.integers(0, 3_000)), max_size=20)


def above(outcome: Outcome, steps: list[Step], terms: Terms) -> int:
    """What is paid above reading the base and answering; the first step fills the base."""
    rates, shape = terms.rates, terms.shape
    least = sum(rates.cached * shape.base + rates.output * step.output for step in steps)
    return outcome.amount - least - (rates.written - rates.cached) * steps[0].growth


def filled(growth: list[int], shape: Shape) -> list[Step]:
    """A session whose first request has the base's length; no later one grows by more than the tail."""
    return [Step(shape.base - shape.prefix, 3), *(Step(each, 3) for each in growth)]


# ---- sessions -------------------------------------------------------------------------------------------


@given(growths, rates(plain=True), shapes)
def test_ski_rental_costs_at_most_twice_the_optimum(growth: list[int], price: Rates, shape: Shape) -> None:
    terms, steps = Terms(price, shape), filled(growth, shape)
    best = above(optimum(steps, terms), steps, terms)
    assert best >= 0
    assert above(simulate("", ski_rental, steps, terms), steps, terms) <= 2 * best


@given(growths, rates(), shapes)
def test_ski_rental_stays_bounded_where_writing_is_dearer(
    growth: list[int], price: Rates, shape: Shape
) -> None:
    """The optimum may compact just when much arrives; ski-rental does not look at that."""
    terms, steps = Terms(price, shape), filled(growth, shape)
    best = above(optimum(steps, terms), steps, terms)
    assert above(simulate("", ski_rental, steps, terms), steps, terms) <= 3 * best


@given(growths, rates(), shapes)
def test_the_shipped_rule_stays_bounded_however_wrong_the_growth_estimate_is(
    growth: list[int], price: Rates, shape: Shape
) -> None:
    terms, steps = Terms(price, shape), filled(growth, shape)
    best = above(optimum(steps, terms), steps, terms)
    assert 2 * above(simulate("", shipped, steps, terms), steps, terms) <= 7 * best


@given(st.lists(st.integers(0, 300) | st.sampled_from([0, TAIL]), max_size=7), rates(), shapes)
@example([300, 0, 10, 10, 10, 10], Rates(10, 10, 0, 10, DAY), Shape(10, 5, TAIL, 0))
def test_the_optimum_is_the_best_of_all_schedules(growth: list[int], price: Rates, shape: Shape) -> None:
    terms = Terms(price, replace(shape, damage_nano=1, instruction=3))
    steps = [Step(each, each % 5) for each in growth]
    best = optimum(steps, terms)
    numbers = range(len(steps))
    costs = {}
    for cuts in (each for count in range(len(steps) + 1) for each in combinations(numbers, count)):
        played = simulate("", lambda state, *_, cuts=cuts: state.requests in cuts, steps, terms)
        if played.cuts == cuts:  # a cut at or below the base is none
            costs[cuts] = played.amount
    assert best.amount == min(costs.values())
    assert costs[best.cuts] == best.amount


@given(growths, rates(), shapes)
def test_no_policy_beats_the_optimum(growth: list[int], price: Rates, shape: Shape) -> None:
    terms, steps = Terms(price, shape), filled(growth, shape)
    best = optimum(steps, terms)
    for policy in (never, ski_rental, shipped):
        assert simulate("", policy, steps, terms).amount >= best.amount


@given(growths, rates(), shapes)
def test_nothing_is_compacted_before_half_of_the_lowest_price_was_paid(
    growth: list[int], price: Rates, shape: Shape
) -> None:
    terms, steps = Terms(price, shape), filled(growth, shape)
    lowest = overhead(price, shape) - (price.written - price.cached) * TAIL
    for cut in simulate("", shipped, steps, terms).cuts[:1]:
        paid = sum(price.cached * (sum(growth[:n])) for n in range(cut))  # the first request is the base
        assert 2 * paid >= lowest


# ---- decisions ------------------------------------------------------------------------------------------


def play(terms: Terms, requests: list[tuple[int, int | None]], missed_by: int = 0) -> list[Decision]:
    """Decisions over a conversation that is compacted whenever it is due, so many tokens above the target."""
    state = begin(terms.shape)
    found: list[Decision] = []
    for prompt, cached in requests:
        state = observed(state, terms, prompt, cached)
        decision = decide(state, terms)
        found.append(decision)
        if isinstance(decision, Compact):
            state = compacted(state, terms, decision.target + missed_by, decision.trigger)
            assert decide(state, terms) == KEEP
            assert decide(state, terms, 0) == KEEP
    return found


@given(every_terms, prompts, st.integers(0, 3_000))
def test_it_never_compacts_twice_without_growth(
    terms: Terms, requests: list[tuple[int, int | None]], missed_by: int
) -> None:
    for decision in play(terms, requests, missed_by):
        if isinstance(decision, Compact):
            assert decision.target >= 0
            trigger = terms.limits.hard_trigger()
            assert trigger is None or 10 * decision.target <= 6 * trigger


@given(every_terms, prompts, st.integers(2, 10**6))
def test_money_is_the_same_in_any_currency(
    terms: Terms, requests: list[tuple[int, int | None]], factor: int
) -> None:
    old = terms.rates
    scaled = replace(
        terms,
        rates=Rates(
            old.uncached * factor, old.cached * factor, old.output * factor, old.written * factor, DAY
        ),
        shape=replace(terms.shape, damage_nano=terms.shape.damage_nano * factor),
    )
    assert play(scaled, requests) == play(terms, requests)


@given(every_terms, prompts)
def test_a_harder_ladder_never_waits_longer(terms: Terms, requests: list[tuple[int, int | None]]) -> None:
    state = begin(terms.shape)
    for prompt, cached in requests:
        state = observed(state, terms, prompt, cached)
        usual, harder = decide(state, replace(terms, harder=Fraction(1))), decide(state, terms)
        if isinstance(usual, Compact):
            assert isinstance(harder, Compact)
        if usual == KEEP and isinstance(harder, Compact):
            # A smaller target may also keep a latency budget that the usual one breaks.
            assert harder.reason in (Reason.LADDER, Reason.LATENCY)


@given(every_terms, prompts)
def test_a_state_stays_sound(terms: Terms, requests: list[tuple[int, int | None]]) -> None:
    state = begin(terms.shape)
    for prompt, cached in requests:
        before = state
        state = observed(state, terms, prompt, cached)
        assert state.tokens == prompt
        assert min(state.spent, state.grown, state.base) >= 0
        assert (state.requests, state.since_base) == (before.requests + 1, before.since_base + 1)
        if prompt >= before.tokens:
            assert state.spent >= before.spent
        shorter = edited(state, terms.shape, prompt // 2)
        assert 0 <= shorter.spent <= state.spent
        assert shorter.base <= state.base


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**15))
def test_more_paid_never_turns_a_compaction_down(tokens: int, grown: int, spent: int) -> None:
    terms = Terms(PRICES["1/.1/1/4"], SHAPE)
    state = Conversation(42_000, tokens, grown, 40, spent, 40)
    if isinstance(decide(state, terms), Compact):
        assert isinstance(decide(replace(state, spent=spent + 1), terms), Compact)
        assert isinstance(decide(replace(state, tokens=tokens + 1), terms), Compact)


@given(st.text(max_size=300))
def test_no_text_breaks_the_overflow_parser(text: str) -> None:
    for message in (text, "This model's maximum context length is 7 tokens" + text):
        found = read_overflow(message)
        assert found is None or found.window > 0


_SCRIPT = """
from datetime import date
from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import Step, compare
from ctxgate.compression.window import Terms
from ctxgate.inference.rates import Rates
steps = [Step(i * 7919 % 3001, i % 13) for i in range(300)]
terms = Terms(Rates(10**9, 10**8, 4 * 10**9, 10**9, date(2026, 11, 30)), Shape(18_000, 4_000, 20_000, 5_500))
print([(each.policy, each.amount, each.cuts) for each in compare(steps, terms)])
"""


def test_every_process_decides_the_same() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "4321")
    }
    assert len(answers) == 1
    assert answers.pop().count(b"shipped") == 1
