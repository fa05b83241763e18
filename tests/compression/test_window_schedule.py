"""What whole sessions cost under each policy, and how near the shipped rule is to the optimum."""

from __future__ import annotations

import random
from math import exp, fsum, log
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import (
    Step,
    compare,
    fixed,
    never,
    optimum,
    recorded_steps,
    shipped,
    simulate,
    ski_rental,
)
from ctxgate.compression.window import Terms
from ctxgate.gateway.policy_table import dollars as in_dollars
from ctxgate.gateway.policy_table import rows, text
from support.compaction import PRICES, SHAPE, dollars, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Dollars: fixed triggers from 60k to 250k, never, ski-rental with its compactions, the offline optimum.
TABLE = {
    "5/.5/6.25/25": ("22.979 23.126 23.917 27.659 31.525 37.277 58.494 22.096", 9, "21.593"),
    "1.25/.125/1.25/10": ("6.568 6.494 6.652 7.552 8.507 9.929 15.219 6.357", 9, "6.124"),
    "1/.1/1/4": ("4.151 4.268 4.460 5.225 6.010 7.169 11.424 4.131", 11, "3.948"),
    ".14/.0028/.14/.28": ("0.238 0.215 0.209 0.227 0.245 0.275 0.390 0.217", 6, "0.201"),
}
BARS = {"5/.5/6.25/25": 1.05, "1.25/.125/1.25/10": 1.05, "1/.1/1/4": 1.05, ".14/.0028/.14/.28": 1.06}


def test_the_long_session_grows_as_recorded() -> None:
    steps = recorded("coding-long-a")
    assert len(steps) == 468
    assert sum(step.growth for step in steps) == 347_381
    assert sum(step.output for step in steps) == 187_857


@pytest.mark.parametrize("price", PRICES)
def test_the_table_of_the_long_session(price: str) -> None:
    online, compactions, best = TABLE[price]
    (row,) = rows(recorded("coding-long-a"), [Terms(PRICES[price], SHAPE)])
    found = {each.policy: each for each in row.outcomes}
    names = ["60000", "80000", "100000", "130000", "170000", "250000", "never", "ski-rental"]
    assert [in_dollars(found[name].nano) for name in names] == online.split()
    assert len(found["ski-rental"].cuts) == compactions
    assert in_dollars(found["optimum"].nano) == best
    ratio = row.ratio("shipped")
    assert ratio is not None
    assert ratio <= BARS[price]


def test_the_text_of_the_table() -> None:
    steps = recorded("coding-long-a")
    lines = text(rows(steps, [Terms(PRICES["5/.5/6.25/25"], SHAPE)])).splitlines()
    assert lines[0].split()[-4:] == ["ski-rental", "shipped", "optimum", "shipped/optimum"]
    dear = "22.979   23.126   23.917   27.659   31.525   37.277   58.494  22.096 (9)"
    assert " ".join(lines[2].split()).startswith("5/0.5/6.25/25 " + " ".join(dear.split()))
    assert lines[2].endswith("  21.593 (9)            1.029")
    assert text([]) == ""
    assert [in_dollars(nano) for nano in (0, 499_999, 500_000, 1_234_567_890)] == [
        "0.000", "0.000", "0.001", "1.235",
    ]  # fmt: skip


def of(growth: Iterable[float]) -> tuple[Step, ...]:
    return tuple(Step(max(0, int(each)), 400) for each in growth)


def shuffled(steps: Sequence[Step], seed: int) -> tuple[Step, ...]:
    return tuple(random.Random(seed).sample(steps, len(steps)))


def patterns() -> dict[str, tuple[Step, ...]]:
    """Ways to grow that have nothing to do with the recorded session."""
    draw = random.Random(5)
    heavy = {f"pareto-{n}": of(min(2e4, 300 * draw.paretovariate(1.2)) for _ in range(500)) for n in range(2)}
    uneven = {f"lognormal-{n}": of(draw.lognormvariate(5.5, 1.5) for _ in range(500)) for n in range(2)}
    return heavy | uneven | {
        "steady": of([800] * 500),
        "steady and short": of([800] * 120),
        "phases": of(3000 if (i // 40) % 2 == 0 else 100 for i in range(500)),
        "steps": of(20_000 if i % 25 == 0 else 100 for i in range(500)),
        "slowing": of(60_000 / (i + 10) for i in range(500)),
        "quickening": of(i * 4 for i in range(500)),
        "burst first": of([20_000] * 4 + [150] * 500),
        "burst last": of([150] * 300 + [12_000] * 20),
    }  # fmt: skip


def ratios(sessions: Iterable[Sequence[Step]]) -> tuple[list[float], list[float]]:
    """What the shipped rule and ski-rental cost over the optimum, for every session at every price."""
    pairs = []
    for steps in sessions:
        for price in PRICES.values():
            terms = Terms(price, SHAPE)
            best = optimum(steps, terms).amount
            pairs.append([simulate("", each, steps, terms).amount / best for each in (shipped, ski_rental)])
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(fsum(map(log, values)) / len(values))


@pytest.mark.integration
def test_the_shipped_rule_beats_ski_rental_on_growth_it_was_not_made_for() -> None:
    ours, classic = ratios(patterns().values())
    assert mean(ours) < mean(classic)
    assert max(ours) <= 1.13 < max(classic)


@pytest.mark.integration
def test_the_shipped_rule_on_the_recorded_sessions_in_other_orders_and_joined() -> None:
    long = recorded("coding-long-a")
    airline = [step for n in range(24) for step in recorded(f"airline-{n:03}-0")]
    repair = [*recorded("repair-a"), *recorded("repair-b")]
    sessions = [long[::-1], long[:234], long[234:], long * 2, airline * 3, repair * 20]
    sessions += [shuffled(long, seed) for seed in range(3)]
    ours, classic = ratios(sessions)
    assert mean(ours) < mean(classic)
    assert max(ours) <= 1.11


@pytest.mark.parametrize("name", ["airline-000-0", "airline-003-0", "repair-a", "repair-b"])
def test_short_sessions_are_left_alone(name: str) -> None:
    for price in PRICES.values():
        for outcome in compare(recorded(name), Terms(price, SHAPE)):
            assert outcome.cuts == ()


def test_one_compaction_by_hand() -> None:
    """P = 10, S = K = 5, So = 3, q = 2, D = 7 nano, at 2/1/4/8 micro-dollars; the length goes 10, 25, 40."""
    shape = Shape(10, 5, 5, 3, instruction=2, damage_nano=7)
    terms = Terms(dollars(2, 1, 4, 8), shape)
    steps = (Step(15, 1), Step(15, 2), Step(10, 3))
    kept = (10 + 60 + 8) + (25 + 60 + 16) + (40 + 40 + 24)
    assert simulate("", never, steps, terms).nano == kept * 1000
    # before the second request: 40 + 4 x 2 + 8 x 3 + D; then 10 + 4 x 10 + 16; the third grows from 20
    cut = (10 + 60 + 8) + (40 + 8 + 24 + 10 + 40 + 16) + (20 + 40 + 24)
    outcome = simulate("", fixed(40), steps, terms)
    assert (outcome.nano, outcome.cuts) == (cut * 1000 + 7, (1,))
    # the first request is above the base of 20, too: 25 + 8 + 24 + 10 + 40 + 8, and then 20 + 60 + 16
    assert simulate("", fixed(1), steps, terms).cuts == (0, 1, 2)


def test_nothing_is_compacted_at_or_below_the_base() -> None:
    terms = Terms(PRICES["1/.1/1/4"], SHAPE)
    outcome = simulate("", fixed(1), of([24_000, 1, 0, 1]), terms)
    assert outcome.cuts == (1, 3)


def test_without_requests_nothing_costs_anything() -> None:
    terms = Terms(PRICES["1/.1/1/4"], SHAPE)
    assert {(each.amount, each.cuts) for each in compare((), terms)} == {(0, ())}
    assert rows((), [terms])[0].ratio("shipped") is None


def test_off_by_a_factor_costs_half_of_the_factor_and_its_inverse() -> None:
    """Steady growth of 100: X* = sqrt(2 x 593,000 x 100) = 10,890, so 2180 requests are 20 times X*."""
    terms, growth, requests = Terms(PRICES["5/.5/6.25/25"], SHAPE), 100, 2180
    steps = (Step(24_000, 0), *of([growth] * requests))
    everyone = sum(500_000_000 * 42_000 + 25 * 10**9 * step.output for step in steps)
    everyone += 5_750_000_000 * (24_000 + requests * growth)  # (w - c) for what is new

    def above(factor: float) -> float:
        return simulate("", fixed(42_000 + int(factor * 10_890)), steps, terms).amount - everyone

    for factor in (0.5, 2.0, 4.0):
        assert above(factor) / above(1) == pytest.approx((factor + 1 / factor) / 2, rel=0.03)


def test_ski_rental_waits_until_the_price_is_paid() -> None:
    """At 1/.1/1/4 F0 is 4.2k + 22k + 21.6k = 47.8k; 10k above the base cost 1k each time: request 49 pays."""
    terms = Terms(PRICES["1/.1/1/4"], SHAPE)
    steps = of([34_000, *[0] * 60])
    assert simulate("", ski_rental, steps, terms).cuts == (48,)


def test_the_growth_rule_of_recorded_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "not counted"},
        {"role": "user", "content": "12345"},
        {"role": "assistant", "content": None, "tool_calls": [call], "_recorded": {"output": 77}},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "abc"}, {"type": "image"}],
        },
        {"role": "assistant", "content": "done."},
    ]
    # 5 characters are 2 tokens; then 4 + 2 + 3 = 9 are 3; an answer of 5 that nobody counted is 2
    assert recorded_steps(messages) == (Step(2, 77), Step(3, 2))


def test_the_cuts_of_the_optimum_played_as_a_policy_cost_what_it_says() -> None:
    steps = shuffled(of(range(0, 4000, 5)), 1)
    terms = Terms(PRICES["1/.1/1/4"], SHAPE)
    best = optimum(steps, terms)
    assert len(best.cuts) > 20
    played = simulate("optimum", lambda state, *_: state.requests in best.cuts, steps, terms)
    assert played == best
