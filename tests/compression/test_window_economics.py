"""The formulas of one compaction, with every number of the tables worked out beforehand."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from ctxgate.compression import economics
from ctxgate.compression.economics import Shape
from support.compaction import SHAPE, dollars

if TYPE_CHECKING:
    from ctxgate.inference.rates import Rates

# u = 1 everywhere; the last has no cache: every token costs the same.
TENTH = dollars(1, 0.1, 1.25, 5)
TENTH_PLAIN = dollars(1, 0.1, 1, 8)
QUARTER = dollars(1, 0.25, 1, 4)
FIFTIETH = dollars(1, 0.02, 1, 2)
UNCACHED = dollars(1, 1, 1, 5)
MILLION = 10**6


def long_shape(history_summary: int, output: int) -> Shape:
    return Shape(prefix=18_000, summary=history_summary, tail=20_000, summary_output=output)


@pytest.mark.parametrize(
    ("rates", "middle", "long"),
    [
        (TENTH, ("4.8", "13.8"), ("2.1", "11.1")),
        (TENTH_PLAIN, ("5.5", "14.5"), ("2.4", "11.4")),
        # 861k / 198k = 4.348
        (QUARTER, ("2.3", "5.1"), ("1.4", "4.3")),
        # (3.96k + 11k + 23.52k) / 3.12k = 12.333 and (160k + 11k + 23.52k) / 3.12k = 62.346
        (FIFTIETH, ("12.3", "62.3"), ("4.1", "53.5")),
        (UNCACHED, ("1.4", "1.2"), ("1.1", "1.1")),
    ],
    ids=["tenth", "tenth-plain", "quarter", "fiftieth", "uncached"],
)
def test_break_even_requests(rates: Rates, middle: tuple[str, str], long: tuple[str, str]) -> None:
    for history, shape, expected in (
        (160_000, long_shape(4_000, 5_500), middle),
        (800_000, long_shape(8_000, 10_000), long),
    ):
        calls = (
            economics.suffix_call(rates, shape, history),
            economics.separate_call(rates, shape, history),
        )
        found = [economics.break_even(rates, shape, history, call) for call in calls]
        assert all(each is not None for each in found)
        assert tuple(f"{float(each or 0):.1f}" for each in found) == expected


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (50_000, Fraction(635, 10)),  # (10k + 250k + 57.5k) / 5k
        (5_000, Fraction(815, 190)),  # (10k + 25k + 5.75k) / 9.5k = 4.29
    ],
)
def test_shallow_compactions_hardly_ever_pay(summary: int, expected: Fraction) -> None:
    """Of a history of 100k, and nothing else, a half is left, or a twentieth."""
    shape = Shape(prefix=0, summary=summary, tail=0, summary_output=summary)
    call = economics.suffix_call(TENTH, shape, 100_000)
    assert economics.break_even(TENTH, shape, 100_000, call) == expected


def test_the_gain_is_nothing_at_the_break_even_and_grows_with_each_request() -> None:
    call = economics.suffix_call(TENTH, SHAPE, 160_000)
    # (1.25 - .1)(4k + 20k) + .1 (18k + 160k + 20k) + 5 x 5.5k = 27.6k + 19.8k + 27.5k, at dollars per million
    once = 74_900 * 10**9
    assert economics.gain(TENTH, SHAPE, 160_000, call, 0) == -once
    assert economics.gain(TENTH, SHAPE, 160_000, call, 1) == -once + 15_600 * 10**9
    assert economics.break_even(TENTH, SHAPE, 160_000, call) == Fraction(749, 156)
    assert economics.gain(TENTH, SHAPE, 160_000, call, 4) < 0 < economics.gain(TENTH, SHAPE, 160_000, call, 5)


def test_what_shortens_nothing_or_saves_nothing_never_pays() -> None:
    assert economics.break_even(TENTH, SHAPE, SHAPE.summary, 1) is None
    assert economics.break_even(dollars(1, 0, 1, 2), SHAPE, 160_000, 1) is None
    assert economics.edit_break_even(TENTH, 100, 100, 5) is None
    assert economics.edit_break_even(dollars(1, 0, 1, 2), 100, 10, 5) is None


def test_instruction_and_damage_count_once() -> None:
    shape = Shape(18_000, 4_000, 20_000, 5_500, instruction=200, damage_nano=30_000)
    suffix = economics.suffix_call(TENTH, shape, 160_000)
    assert suffix - economics.suffix_call(TENTH, SHAPE, 160_000) == 200 * 1_250_000_000
    separate = economics.separate_call(TENTH, shape, 160_000)
    assert separate - economics.separate_call(TENTH, SHAPE, 160_000) == 200 * 1_000_000_000
    more = economics.overhead(TENTH, shape) - economics.overhead(TENTH, SHAPE)
    assert more == 200 * 1_250_000_000 + 30_000 * MILLION
    lost = economics.gain(TENTH, SHAPE, 160_000, suffix, 9) - economics.gain(TENTH, shape, 160_000, suffix, 9)
    assert lost == 30_000 * MILLION


@pytest.mark.parametrize(
    ("rates", "overhead", "trigger"),
    [
        # c B + o So + (w - c)(S + K), in dollars per million times tokens
        (TENTH, 4_200 + 27_500 + 27_600, 80),
        (QUARTER, 10_500 + 22_000 + 18_000, 64),
        (FIFTIETH, 840 + 11_000 + 23_520, 107),
        (UNCACHED, 42_000 + 27_500, 55),
    ],
    ids=["tenth", "quarter", "fiftieth", "uncached"],
)
def test_overhead_and_the_optimal_trigger(rates: Rates, overhead: int, trigger: int) -> None:
    assert economics.overhead(rates, SHAPE) == overhead * 10**9
    growth = economics.optimal_growth(rates, SHAPE, Fraction(1200))
    assert growth is not None
    assert round((SHAPE.base + growth) / 1000) == trigger


def test_free_cached_tokens_have_no_optimal_growth() -> None:
    assert economics.optimal_growth(dollars(1, 0, 1, 2), SHAPE, Fraction(1200)) is None


def test_a_cheaper_summarizer_needs_rates_below_a_share() -> None:
    """(19.8k + 27.5k) / (160k + 27.5k) = .2523 at 160k."""
    share = economics.cheaper_share(TENTH, SHAPE, 160_000)
    assert share == Fraction(473, 1875)
    assert economics.cheaper_share(dollars(0, 0, 0, 0), SHAPE, 160_000) is None


def test_one_request_warm_and_cold() -> None:
    """90k of which 2k are new and 500 of output, at 1/.1/1.25/5: 8.8k + 2.5k + 2.5k; cold 112.5k + 2.5k."""
    assert economics.warm_request(TENTH, 90_000, 2_000, 500) == 13_800 * 10**9
    assert economics.cold_request(TENTH, 90_000, 500) == 115_000 * 10**9


def test_an_edit_of_a_warm_prompt_pays_after_so_many_requests() -> None:
    """((1.25 - .1) / .1) x 20k / (3k - 500) = 11.5 x 8."""
    assert economics.edit_break_even(TENTH, 3_000, 500, 20_000) == 92


@pytest.mark.parametrize(("item", "percent"), [(3_000, 81), (300, 17)])
def test_drop_now_and_fetch_later(item: int, percent: int) -> None:
    """N = 60, L = 90k, a call of 100 tokens: 18k / (3.75k + 9k + 9k + .5k), and a tenth of the item."""
    bound = economics.drop_bound(TENTH, item, 60, 90_000, 100)
    assert round(bound * 100) == percent
    assert economics.drop_bound(dollars(0, 0, 0, 0), item, 60, 90_000, 100) == 0


def test_amounts_are_rounded_once_half_up() -> None:
    assert [economics.to_nano(amount) for amount in (0, 499_999, 500_000, 1_499_999, 1_500_000)] == [
        0, 0, 1, 1, 2,
    ]  # fmt: skip


def test_negative_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="tail is negative"):
        Shape(prefix=1, summary=1, tail=-1, summary_output=1)
