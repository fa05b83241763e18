"""The pricing function, with every amount worked out by hand."""

from __future__ import annotations

import decimal
from datetime import date

import pytest

from ctxgate.inference.rates import RateCard, Rates, charge, format_usd, rates_at
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, UNKNOWN, Usage, estimated, measured
from ctxgate.inference.usage_parse import parse_usage

DAY = date(2026, 11, 30)
DOLLAR = 10**9  # nano


def rates(
    uncached: float, cached: float, output: float, written: float | None = None, *, above: int = 0
) -> Rates:
    """Rates in dollars per million tokens."""
    return Rates(
        uncached=round(uncached * DOLLAR),
        cached=round(cached * DOLLAR),
        output=round(output * DOLLAR),
        written=round((uncached if written is None else written) * DOLLAR),
        effective=date(2026, 1, 1),
        above_prompt_tokens=above,
    )


def card(*tiers: Rates) -> RateCard:
    return RateCard(versions=(tiers,))


def usage(prompt: int, cached: int, output: int, written: int | None = None) -> Usage:
    return Usage(
        uncached=measured(prompt - cached),
        cached=measured(cached),
        output=measured(output),
        written=UNKNOWN if written is None else measured(written),
    )


def test_gateways_a1_cached_tokens_are_not_billed_at_the_full_input_price() -> None:
    bill = charge(usage(2006, 1920, 300), card(rates(2.5, 1.25, 10)), DAY)
    assert bill.uncached == 86 * 2_500  # 215 000, not 2006 * 2 500
    assert bill.cached == 1920 * 1_250
    assert bill.output == 300 * 10_000
    assert bill.total == 215_000 + 2_400_000 + 3_000_000
    assert bill.exact


def test_gateways_a2_long_turn_prices_the_cached_98_percent_at_the_cached_rate_of_its_tier() -> None:
    tiers = card(rates(1.25, 0.125, 10), rates(2.5, 0.25, 15, above=200_000))
    bill = charge(usage(262_960, 257_955, 1_744), tiers, DAY)
    assert bill.uncached == 5_005 * 2_500  # 12 512 500
    assert bill.cached == 257_955 * 250  # 64 488 750
    assert bill.output == 1_744 * 15_000  # 26 160 000
    assert bill.total == 103_161_250


def test_gateways_a4_operator_defined_price_keeps_its_cached_rate() -> None:
    bill = charge(usage(6_074, 3_456, 285), card(rates(2.5, 0.25, 15)), DAY)
    assert (bill.uncached, bill.cached, bill.output) == (6_545_000, 864_000, 4_275_000)
    assert bill.total == 11_684_000
    assert format_usd(bill.total) == "0.011684"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (272_000, 1_000 * 2_500 + 271_000 * 250),  # the edge itself still belongs to the lower tier
        (272_001, 1_001 * 5_000 + 271_000 * 500),  # one token above it, all tokens go at the higher tier
        (300_000, 29_000 * 5_000 + 271_000 * 500),
    ],
)
def test_gateways_a16_tier_goes_by_the_whole_prompt_and_replaces_every_rate(
    prompt: int, expected: int
) -> None:
    tiers = card(rates(2.5, 0.25, 15), rates(5, 0.5, 22.5, above=272_000))
    bill = charge(usage(prompt, 271_000, 10), tiers, DAY)
    assert (bill.uncached or 0) + (bill.cached or 0) == expected
    assert bill.output == (10 * 15_000 if prompt <= 272_000 else 10 * 22_500)


def test_gateways_a16_highest_of_several_tiers_wins() -> None:
    tiers = card(rates(1, 0.1, 2), rates(2, 0.2, 4, above=100), rates(3, 0.3, 6, above=1_000))
    assert [rates_at(tiers, DAY, n).uncached // DOLLAR for n in (0, 100, 101, 1_000, 1_001)] == [
        1,
        1,
        2,
        2,
        3,
    ]


def test_gateways_a17_an_estimate_is_priced_by_the_function_that_prices_the_ledger() -> None:
    tiers = card(rates(2.5, 0.25, 15), rates(5, 0.5, 22.5, above=200_000))
    guess = Usage(uncached=estimated(50_000), cached=estimated(200_000), output=estimated(400))
    bill = charge(guess, tiers, DAY)
    same = charge(usage(250_000, 200_000, 400), tiers, DAY)
    assert bill.total == same.total == 50_000 * 5_000 + 200_000 * 500 + 400 * 22_500
    assert not bill.exact
    assert same.exact


def test_gateways_a19_a_rate_is_per_million_tokens() -> None:
    bill = charge(usage(1_000_000, 0, 0), card(rates(2.5, 0.25, 15)), DAY)
    assert format_usd(bill.total or 0) == "2.5"


def test_gateways_a20_four_separate_rates() -> None:
    # uncached 2k, read 80k, written 5k, output 1k at 3 / 0.3 / 3.75 / 15
    parsed = parse_usage(
        {
            "input_tokens": 2_000,
            "cache_read_input_tokens": 80_000,
            "cache_creation_input_tokens": 5_000,
            "output_tokens": 1_000,
        },
        "exclusive",
    )
    assert parsed.usage is not None
    bill = charge(parsed.usage, card(rates(3, 0.3, 15, 3.75)), DAY)
    assert bill.uncached == 6_000_000 + 18_750_000
    assert bill.cached == 24_000_000
    assert bill.output == 15_000_000
    assert bill.total == 63_750_000


def test_gateways_a22_written_part_is_priced_inside_the_uncached_component() -> None:
    # 200 fresh + 1 000 written = 1 200 uncached of 6 200; 5 000 read; 300 out
    bill = charge(usage(6_200, 5_000, 300, written=1_000), card(rates(3, 0.3, 15, 3.75)), DAY)
    assert bill.uncached == 200 * 3_000 + 1_000 * 3_750
    assert bill.total == 4_350_000 + 1_500_000 + 4_500_000


def test_gateways_a22_unknown_written_part_goes_at_the_uncached_rate() -> None:
    bill = charge(usage(6_200, 5_000, 300), card(rates(3, 0.3, 15, 3.75)), DAY)
    assert bill.uncached == 1_200 * 3_000


def test_gateways_a23_every_caller_gets_the_discount_because_the_record_carries_the_split() -> None:
    bill = charge(usage(10_000, 9_000, 0), card(rates(2, 0.2, 8)), DAY)
    assert bill.total == 1_000 * 2_000 + 9_000 * 200


def test_api_b5_a_mostly_cached_prompt_is_priced_once() -> None:
    bill = charge(usage(100_000, 95_000, 0), card(rates(3, 0.3, 15)), DAY)
    assert bill.total == 5_000 * 3_000 + 95_000 * 300  # 43.5 mUSD; full price on top would be 328.5


def test_api_b19_a_call_below_a_cent_is_not_rounded_away() -> None:
    # 2 500 calls of 0.004 USD: 1 600 tokens at 2.5 USD per million
    bill = charge(usage(1_600, 0, 0), card(rates(2.5, 0.25, 15)), DAY)
    assert bill.total == 4_000_000
    assert format_usd(2_500 * (bill.total or 0)) == "10"


def test_api_b21_an_ambient_decimal_context_changes_nothing() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        bill = charge(usage(262_960, 257_955, 1_744), card(rates(2.5, 0.25, 15)), DAY)
        assert format_usd(bill.total or 0) == "0.10316125"


@pytest.mark.parametrize(
    ("rate", "tokens", "nano"),
    [
        (499_999, 1, 0),
        (500_000, 1, 1),  # exactly a half rounds up
        (1_499_999, 1, 1),
        (500_000, 3, 2),  # 1.5 -> 2
        (333_333, 3, 1),  # 0.999999 -> 1
    ],
)
def test_each_component_is_rounded_once_half_up(rate: int, tokens: int, nano: int) -> None:
    prices = RateCard(((Rates(rate, rate, rate, rate, date(2026, 1, 1)),),))
    bill = charge(Usage(measured(tokens), measured(tokens), measured(tokens)), prices, DAY)
    assert (bill.uncached, bill.cached, bill.output, bill.total) == (nano, nano, nano, 3 * nano)


def test_written_and_fresh_tokens_are_rounded_as_one_component() -> None:
    # 0.4 + 0.4 nano = 0.8 -> 1; rounded apart they would give 0
    prices = RateCard(((Rates(400_000, 0, 0, 400_000, date(2026, 1, 1)),),))
    bill = charge(Usage(measured(2), measured(0), measured(0), written=measured(1)), prices, DAY)
    assert bill.uncached == 1


def test_unknown_counts_have_no_price_and_nothing_known_has_no_total() -> None:
    prices = card(rates(2.5, 0.25, 15))
    bill = charge(NOTHING_KNOWN, prices, DAY)
    assert (bill.uncached, bill.cached, bill.output, bill.total) == (None, None, None, None)
    assert not bill.exact
    partly = charge(Usage(UNKNOWN, UNKNOWN, measured(10)), prices, DAY)
    assert (partly.uncached, partly.cached, partly.output) == (None, None, 150_000)
    assert partly.total == 150_000
    assert not partly.exact


def test_nothing_used_costs_nothing_exactly() -> None:
    bill = charge(NOTHING_USED, card(rates(2.5, 0.25, 15)), DAY)
    assert (bill.total, bill.exact) == (0, True)


def test_prompt_of_unknown_length_is_priced_by_the_base_tier() -> None:
    tiers = card(rates(1, 0.1, 10), rates(2, 0.2, 20, above=10))
    assert charge(Usage(UNKNOWN, UNKNOWN, measured(1)), tiers, DAY).output == 10_000


def test_prompt_total_without_its_split_still_chooses_the_tier() -> None:
    tiers = card(rates(1, 0.1, 10), rates(2, 0.2, 20, above=10))
    record = Usage(UNKNOWN, UNKNOWN, measured(1), prompt_total=measured(11))
    bill = charge(record, tiers, DAY)
    assert bill.output == 20_000
    assert (bill.uncached, bill.cached) == (None, None)


def test_the_version_in_force_on_the_day_applies_and_before_the_first_the_first() -> None:
    old = Rates(1, 1, 1, 1, date(2026, 1, 1))
    new = Rates(2, 2, 2, 2, date(2026, 6, 1))
    newest = Rates(3, 3, 3, 3, date(2026, 12, 1))
    dated = RateCard(((old,), (new,), (newest,)))
    days = {
        date(2025, 12, 31): old,
        date(2026, 1, 1): old,
        date(2026, 5, 31): old,
        date(2026, 6, 1): new,
        date(2026, 11, 30): new,
        date(2026, 12, 1): newest,
        date(2030, 1, 1): newest,
    }
    assert {day: rates_at(dated, day, 0) for day in days} == days
    assert charge(NOTHING_USED, dated, date(2026, 7, 1)).rates_effective == date(2026, 6, 1)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0"),
        (1, "0.000000001"),
        (11_684_000, "0.011684"),
        (1_500_000_000, "1.5"),
        (10**9, "1"),
        (123_456_789_000_000_001, "123456789.000000001"),
        (-500_000_000, "-0.5"),
    ],
)
def test_format_usd_is_exact(nano: int, text: str) -> None:
    assert format_usd(nano) == text


def test_a_part_cannot_be_larger_than_its_whole() -> None:
    with pytest.raises(ValueError, match="larger than the whole"):
        Usage(measured(5), measured(0), measured(1), written=measured(6))
    with pytest.raises(ValueError, match="larger than the whole"):
        Usage(measured(5), measured(0), measured(1), reasoning=measured(2))
