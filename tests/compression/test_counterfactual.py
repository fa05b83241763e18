"""What a conversation would have cost otherwise: against the simulated policies, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.counterfactual import (
    START,
    Costs,
    Lines,
    Terms,
    Turn,
    called,
    looked_up,
    observed,
)
from ctxgate.compression.economics import Shape, warm_request
from ctxgate.compression.schedule import Step, fixed, never, simulate, ski_rental
from ctxgate.compression.window import Terms as Policy
from ctxgate.inference.rates import Rates
from support.compaction import PRICES, SHAPE, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

RATES = Rates(uncached=10, cached=1, output=40, written=10, effective=date(2026, 11, 1))
SMALL = Shape(prefix=100, summary=50, tail=50, summary_output=20)


def terms(rates: Rates = RATES, shape: Shape = SMALL, window: int | None = None) -> Terms:
    return Terms(lambda _tokens: rates, shape, window)


@dataclass
class Totals:
    """Sums over a session: what was paid, and what the lines say it would have been."""

    paid: int = 0
    plain: int = 0
    fixed: int = 0
    possible: bool = True
    lines: Lines = field(default=START)
    closed: list[int] = field(default_factory=list)


def play(steps: Sequence[Step], cuts: Sequence[int], rates: Rates, shape: Shape, window: int) -> Totals:
    """A session that is always warm, compacted before the requests `cuts`, as `schedule.simulate` does."""
    totals = Totals()
    length = plain = shape.prefix
    for number, step in enumerate(steps):
        plain += step.growth
        length += step.growth
        if number in cuts:
            call = rates.cached * length + rates.output * shape.summary_output
            totals.paid += call
            totals.lines = called(totals.lines, call)
            length = shape.base
            turn = Turn(length, shape.prefix, step.output, plain - length, shared=shape.prefix)
        else:
            turn = Turn(length, length - step.growth, step.output, plain - length)
        paid = warm_request(rates, length, length - (turn.cached or 0), step.output)
        totals.lines, costs = observed(totals.lines, turn, terms(rates, shape, window))
        assert costs.fixed is not None
        totals.paid += paid
        totals.fixed += paid + costs.fixed
        if costs.plain is None:
            totals.possible = False
        else:
            totals.plain += paid + costs.plain
        if costs.closed is not None:
            totals.closed.append(costs.closed)
    return totals


@pytest.mark.parametrize("price", PRICES)
def test_the_lines_of_the_long_session_cost_what_the_policies_do(price: str) -> None:
    steps, rates = recorded("coding-long-a"), PRICES[price]
    policy = Policy(rates, SHAPE)
    ours = simulate("ours", ski_rental, steps, policy)
    found = play(steps, ours.cuts, rates, SHAPE, 400_000)
    assert found.possible
    assert found.paid == ours.amount
    assert found.plain == simulate("never", never, steps, policy).amount
    assert found.fixed == simulate("fixed", fixed(320_000), steps, policy).amount
    # Each compaction by itself: what follows at the dearest price is a saving, less its own price.
    assert len(found.closed) == len(ours.cuts) - 1
    assert all(net > 0 for net in found.closed)


def test_before_the_first_compaction_every_line_costs_what_was_paid() -> None:
    lines, none = START, Costs(0, 0)
    for turn in (Turn(1000, 300, 5), Turn(1500, 0, 5), Turn(2000, 1490, 5), Turn(1200, 900, 7)):
        lines, costs = observed(lines, turn, terms(window=1_000_000))
        assert costs == none
    assert lines == Lines(1200, 1200, 1200)
    assert lines.left() is None


def test_a_compaction_by_hand() -> None:
    """c 1, w 10: 1,000 tokens were sent, a call of 900 was paid, and 200 are left of 1,100."""
    lines, _ = observed(START, Turn(1000, 0, 5), terms())
    lines = called(lines, 900)
    lines, costs = observed(lines, Turn(200, 100, 5, removed=900, shared=100), terms())
    # Ours: 100 + 1000. Plain: 1,000 cached and 100 new are 2,000.
    assert costs == Costs(plain=900, fixed=None)
    assert (lines.without, lines.net, lines.calls) == (900, -900 + 900, 0)
    lines, costs = observed(lines, Turn(250, 200, 5, removed=900), terms())
    assert costs == Costs(plain=900, fixed=None)  # 900 more read from the cache
    assert lines.left() == 900


def test_look_ups_are_a_price_of_the_compaction_that_made_them_necessary() -> None:
    lines, _ = observed(START, Turn(1000, 0, 5), terms())
    assert looked_up(lines, 70) == lines, "nothing was left out yet: no later compaction pays for it"
    lines, _ = observed(called(lines, 900), Turn(200, 100, 5, removed=900, shared=100), terms())
    assert looked_up(lines, 70).left() == -70
    lines, costs = observed(looked_up(lines, 70), Turn(250, 200, 5, removed=900), terms())
    assert costs.plain == 900
    assert lines.left() == 900 - 70


def test_a_second_compaction_is_judged_by_itself() -> None:
    lines, _ = observed(START, Turn(1000, 0, 5), terms())
    lines, _ = observed(called(lines, 900), Turn(200, 100, 5, removed=900, shared=100), terms())
    lines, _ = observed(lines, Turn(300, 200, 5, removed=900), terms())
    # Removes 150 of 350. By the first one's measure the request saves 1,050 of the plain line's.
    lines, costs = observed(called(lines, 400), Turn(200, 100, 5, removed=1050, shared=100), terms())
    assert costs.closed == 0 + 900
    # Ours 1,100; without the second: 300 cached, 50 new: 800. It costs 300 more, and the call.
    assert (lines.without, lines.left()) == (150, -400 - 300)
    # Plain: 1,200 cached, 50 new: 1,700.
    assert costs.plain == 1700 - 1100


def test_a_cold_turn_would_have_been_cold_on_every_line() -> None:
    lines, _ = observed(START, Turn(1000, 0, 5), terms())
    lines, _ = observed(lines, Turn(200, 100, 5, removed=900, shared=100), terms())
    lines, costs = observed(lines, Turn(250, 0, 5, removed=900), terms())
    assert costs.plain == 9000  # all 900 of them computed again
    lines, costs = observed(lines, Turn(300, 125, 5, removed=900), terms())
    assert costs.plain == 450 + 4500  # half of what was sent was cached
    assert Fraction(costs.plain, 900) == Fraction(1 + 10, 2)


def test_calls_that_come_to_nothing_are_a_loss() -> None:
    lines, _ = observed(START, Turn(1000, 0, 5), terms())
    assert called(lines, 900).left() == -900
    lines, _ = observed(called(lines, 900), Turn(1100, 1000, 5), terms())
    lines, costs = observed(called(lines, 950), Turn(200, 100, 5, removed=1000, shared=100), terms())
    assert costs.closed is None
    assert lines.left() == -1850 + 1000  # 1,100 cached tokens and 100 new for 100 and 100


def test_a_prompt_beyond_the_window_would_have_cost_nothing_that_is_known() -> None:
    lines, _ = observed(START, Turn(900, 0, 5), terms(window=1000))
    _, costs = observed(lines, Turn(200, 100, 5, removed=795, shared=100), terms(window=1000))
    assert costs.plain is not None  # 995 and 5 of output just fit
    _, costs = observed(lines, Turn(200, 100, 6, removed=795, shared=100), terms(window=1000))
    assert costs.plain is None
    assert costs.fixed is not None


def test_what_the_engine_does_not_say_is_unknown() -> None:
    lines, costs = observed(START, Turn(1000, None, 5), terms(window=2000))
    assert costs == Costs(None, None)
    assert lines.prompt == lines.plain == 1000


def test_a_dearer_tier_counts_on_the_line_that_reaches_it() -> None:
    dear = Rates(uncached=20, cached=2, output=80, written=20, effective=date(2026, 11, 1))
    tiers = Terms(lambda tokens: dear if tokens > 1000 else RATES, SMALL)
    lines, _ = observed(START, Turn(1000, 0, 5), tiers)
    _, costs = observed(lines, Turn(200, 100, 5, removed=900, shared=100), tiers)
    # Plain: (2 x 1,000 + 20 x 100 + 80 x 5), ours: (100 + 10 x 100 + 40 x 5).
    assert costs.plain == 4400 - 1300
