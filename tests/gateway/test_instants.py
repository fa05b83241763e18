"""Moments as people and programs write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ctxgate.gateway.instants import instant_us
from support.ledgers import DAY_US, NOON_US

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("2026-11-30", NOON_US - DAY_US // 2),
        ("20261130", NOON_US - DAY_US // 2),
        ("2026-11-30T12:00", NOON_US),
        ("2026-11-30T13:00:00.000001+01:00", NOON_US + 1),
        ("24h", NOON_US),
        ("1d", NOON_US),
        ("90m", NOON_US + DAY_US - 5_400_000_000),
        ("1w", NOON_US - 6 * DAY_US),
        ("1s", NOON_US + DAY_US - 1_000_000),
        ("999999999999w", 0),
        ("0", 0),
        ("24", 24_000_000),
        ("1796040000", NOON_US),
        ("1099511627776", 2**40 * 1_000_000),
    ],
)
def test_instants(text: str, microseconds: int) -> None:
    assert instant_us(text, NOW) == microseconds


@pytest.mark.parametrize(
    "text",
    [
        "yesterday",
        "-3h",
        "-1",
        "2026-13-01",
        "20261301",
        "",
        "24 h",
        "1e3",
        "1.5",
        "1099511627777",
        "9" * 5_000,
    ],
)
def test_instants_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no moment: write 2026-11-30"):
        instant_us(text, NOW)
