"""Prices: exact, in the unit that the field names, never absent, never implausible."""

from __future__ import annotations

from datetime import date

import pytest

from config_texts import VALID, edited, problems, read_text
from ctxgate.inference.rates import charge
from ctxgate.inference.usage import Usage, measured

UNIT_HINT = "is below 0.0001 USD per million tokens; is it a price per token? Here they are per million"
TOO_FINE = "has more than nine decimals; prices are whole nano-dollars per million tokens"
RATES_FAST = VALID[
    VALID.index("rates: {effective: 2026-01-01, usd_per_million_uncached: 1.25") : VALID.index("models:")
]


def with_rates(rates: str) -> str:
    """The valid text with other rates of the pool `fast`."""
    return edited(RATES_FAST, rates + "\n")


def with_price(uncached: str, cached: str = "0", effective: str = "2026-01-01") -> str:
    return with_rates(
        f"rates: {{effective: {effective}, usd_per_million_uncached: {uncached},\n"
        f"      usd_per_million_cached: {cached}, usd_per_million_output: 10}}"
    )


@pytest.mark.parametrize(
    ("written", "nano"),
    [
        ("0", 0),
        ("0.0375", 37_500_000),
        ("0.1", 100_000_000),
        ("1.25", 1_250_000_000),
        ("10", 10_000_000_000),
        ("2.5e-1", 250_000_000),
        ("1e1", 10_000_000_000),
        ("0.123456789", 123_456_789),
        ("9999.999999999", 9_999_999_999_999),
        ("10000", 10_000_000_000_000),
        ("0.30", 300_000_000),
    ],
)
def test_prices_are_read_exactly(written: str, nano: int) -> None:
    (rates,) = read_text(with_price(written)).config.pools["fast"].rates.versions[0]
    assert (rates.uncached, rates.written, rates.cached) == (nano, nano, 0)


@pytest.mark.parametrize("written", ["10000.000000001", "10001", "2500000", "1e9"])
def test_gateways_a19_price_per_million_cannot_be_read_as_per_token(written: str) -> None:
    """More than 0.01 USD per token means that the unit was mistaken."""
    (only,) = problems(with_price(written))
    assert (only.line, only.column, only.field) == (8, 62, "pools.fast.rates.usd_per_million_uncached")
    assert only.message == (
        "is more than 10,000 USD per million tokens (0.01 USD per token); "
        "prices here are US dollars per million tokens"
    )


def test_gateways_a19_one_call_at_a_price_per_million_costs_what_it_should() -> None:
    """2.5 per million: 1,000 uncached tokens cost 0.0025 USD, not 2,500 USD."""
    card = read_text(with_price("2.5")).config.pools["fast"].rates
    usage = Usage(uncached=measured(1000), cached=measured(0), output=measured(0))
    assert charge(usage, card, date(2026, 6, 1)).total == 2_500_000


def test_gateways_a19_a_field_without_its_unit_is_refused() -> None:
    missing, only = problems(with_price("1").replace("usd_per_million_uncached: 1,", "input: 2.5,"))
    assert (missing.field, missing.message) == ("pools.fast.rates.usd_per_million_uncached", "is missing")
    assert only.field == "pools.fast.rates.input"
    assert only.message.startswith("the unit stands in the name: usd_per_million_uncached,")


def test_one_price_per_token_among_prices_per_million_is_told_before_what_follows_from_it() -> None:
    first, second = problems(with_price("0.0000004", cached="0.04"))
    assert first.field == "pools.fast.rates.usd_per_million_uncached"
    assert "is it a price per token?" in first.message
    assert second.field == "pools.fast.rates.usd_per_million_cached"
    assert second.message.startswith("is above usd_per_million_uncached")


def test_a_price_per_token_in_a_field_per_million_is_a_warning() -> None:
    """2.5 USD per million is 0.0000025 per token."""
    (warning,) = read_text(with_price("0.0000025")).warnings
    assert warning.field == "pools.fast.rates.usd_per_million_uncached"
    assert "is it a price per token?" in warning.message
    assert read_text(with_price("0.0001")).warnings == ()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("-0.5", "a price must not be negative"),
        (".nan", "must be a number of US dollars per million tokens, but is not finite"),
        (".inf", "must be a number of US dollars per million tokens, but is not finite"),
        ("-.INF", "must be a number of US dollars per million tokens, but is not finite"),
        ("nan", "must be a number of US dollars per million tokens, but is not finite"),
        ("true", "must be a number of US dollars per million tokens, but is true or false"),
        ("'1.25'", "must be a number of US dollars per million tokens, but is text; write it without quotes"),
        ("free", "must be a number of US dollars per million tokens, but is text"),
        ("$1.25", "must be a number of US dollars per million tokens, but is text"),
        ("1_000", "must be a number of US dollars per million tokens, in plain decimal digits"),
        ("0x10", "must be a number of US dollars per million tokens, in plain decimal digits"),
        ("010", "must be a number of US dollars per million tokens, in plain decimal digits"),
        ("1:30", "must be a number of US dollars per million tokens, in plain decimal digits"),
        (".5", "must be a number of US dollars per million tokens, in plain decimal digits"),
        ("2026-01-01", "must be a number of US dollars per million tokens, but is a date"),
        ("~", "must be a number of US dollars per million tokens, but is empty"),
        ("[1]", "must be a number of US dollars per million tokens, but is a list"),
        ("0." + "0" * 80 + "1", "must be a number of US dollars per million tokens, in plain decimal digits"),
        (
            "0.0000000001",
            f"{TOO_FINE}; it {UNIT_HINT}",
        ),
        ("0.12345678901", TOO_FINE),
        (
            "1e-10",
            f"{TOO_FINE}; it {UNIT_HINT}",
        ),
    ],
)
def test_what_is_no_price(written: str, message: str) -> None:
    (only,) = problems(with_price(written))
    assert (only.line, only.field) == (8, "pools.fast.rates.usd_per_million_uncached")
    assert only.message == message


def test_cached_above_uncached_is_an_error_also_in_a_tier() -> None:
    (only,) = problems(with_price("1", cached="1.000000001"))
    assert only.field == "pools.fast.rates.usd_per_million_cached"
    assert only.message.startswith("is above usd_per_million_uncached")
    assert read_text(with_price("1", cached="1")).config.pools["fast"].rates.versions[0][0].cached == 10**9
    tier = (
        "{above_prompt_tokens: 9, usd_per_million_uncached: 1, usd_per_million_cached: 2, "
        "usd_per_million_output: 3}"
    )
    (only,) = problems(with_price("1").replace("output: 10}", f"output: 10, tiers: [{tier}]}}"))
    assert only.field == "pools.fast.rates.tiers[0].usd_per_million_cached"


EMPTY = (
    "is empty: the pool would be unpriced. Give effective and the three usd_per_million_... prices "
    "(0 where it is free)"
)


@pytest.mark.parametrize(
    ("rates", "line_column", "field", "message"),
    [
        ("rates: {}", (8, 5), "pools.fast.rates", EMPTY),
        ("rates:", (8, 5), "pools.fast.rates", EMPTY),
        ("rates: []", (8, 5), "pools.fast.rates", "must have at least one entry"),
        ("rates: [{}]", (8, 13), "pools.fast.rates[0]", EMPTY),
        ("rates: 0", (8, 12), "pools.fast.rates", "must be a mapping, not a number"),
    ],
)
def test_gateways_f2_empty_price_entry_is_an_error(
    rates: str, line_column: tuple[int, int], field: str, message: str
) -> None:
    (only,) = problems(with_rates(rates))
    assert ((only.line, only.column), only.field, only.message) == (line_column, field, message)


def test_gateways_f2_a_pool_without_a_price_entry_is_an_error() -> None:
    (only,) = problems(with_rates("abort: true"))
    assert (only.line, only.column, only.field) == (6, 3, "pools.fast.rates")
    assert only.message.startswith("is missing: a pool without prices is not served.")


def test_gateways_f2_a_price_entry_needs_all_three_prices() -> None:
    found = problems(with_rates("rates: {effective: 2026-01-01, usd_per_million_output: 3}"))
    assert [(p.field, p.message) for p in found] == [
        ("pools.fast.rates.usd_per_million_cached", "is missing"),
        ("pools.fast.rates.usd_per_million_uncached", "is missing"),
    ]


def test_gateways_f1_a_free_pool_is_said_to_be_free() -> None:
    text = with_price("0").replace("usd_per_million_output: 10", "usd_per_million_output: 0")
    (warning,) = read_text(text).warnings
    assert warning.message == "every price is 0: all use of these prices is free"


@pytest.mark.parametrize(
    ("edges", "fields"),
    [
        (("0",), ["tiers[0].above_prompt_tokens"]),
        (("200", "100"), ["tiers[1].above_prompt_tokens"]),
        (("200", "200"), ["tiers[1].above_prompt_tokens"]),
        (("200.5",), ["tiers[0].above_prompt_tokens"]),
        (("272K",), ["tiers[0].above_prompt_tokens"]),
        (("100", "200", "150"), ["tiers[2].above_prompt_tokens"]),
    ],
)
def test_tiers_rise_from_above_zero(edges: tuple[str, ...], fields: list[str]) -> None:
    tiers = ", ".join(
        f"{{above_prompt_tokens: {edge}, usd_per_million_uncached: 1, usd_per_million_cached: 1, "
        "usd_per_million_output: 1}"
        for edge in edges
    )
    found = problems(with_price("1").replace("output: 10}", f"output: 10, tiers: [{tiers}]}}"))
    assert [p.field.removeprefix("pools.fast.rates.") for p in found] == fields


@pytest.mark.parametrize(
    "written", ["2026-13-01", "2026-02-30", "01.02.2026", "20260101", "2026-W01-1", "soon", "2026"]
)
def test_days_that_are_none(written: str) -> None:
    (only,) = problems(with_price("1", effective=written))
    assert only.field == "pools.fast.rates.effective"


@pytest.mark.parametrize("written", ["2026-02-28", '"2026-02-28"'])
def test_days(written: str) -> None:
    config = read_text(with_price("1", effective=written)).config
    assert config.pools["fast"].rates.versions[0][0].effective == date(2026, 2, 28)


def test_two_versions_of_one_day_are_an_error_and_a_late_start_is_a_warning() -> None:
    version = (
        "{effective: 2026-09-01, usd_per_million_uncached: 1, usd_per_million_cached: 0, "
        "usd_per_million_output: 1}"
    )
    (only,) = problems(with_rates(f"rates:\n    - {version}\n    - {version}"))
    assert (only.line, only.field, only.message) == (
        10,
        "pools.fast.rates[1].effective",
        "the same day stands on line 9",
    )
    text = with_rates(f"rates: {version}")
    (warning,) = read_text(text, today=date(2026, 8, 31)).warnings
    assert warning.message == "nothing is effective before 2026-09-01: until then those prices are used"
    assert read_text(text, today=date(2026, 9, 1)).warnings == ()
