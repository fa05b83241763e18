"""Moments as people and programs write them: Unix seconds, a date or time, an age. Pure."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Final

FORMS: Final = "2026-11-30, 2026-11-30T12:00 (UTC), Unix seconds, or an age such as 90m, 24h, 7d"
_AGE: Final = re.compile(r"(\d{1,12})([smhdw])", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,13}", re.ASCII)
_COMPACT_DATE: Final = 8  # digits, as in 20261130; as Unix seconds they would lie in 1970 to 1973
_SECONDS_OF: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_EPOCH: Final = date(1970, 1, 1).toordinal()
_DAY_US: Final = 86_400_000_000
_LAST_SECOND: Final = 2**40  # in microseconds it still fits a store's 64 bits


def instant_us(text: str, now: datetime) -> int:
    """Unix microseconds of Unix seconds, of a date or time (UTC unless it says otherwise) or of an age."""
    if age := _AGE.fullmatch(text):
        return max(0, microseconds(now) - int(age[1]) * _SECONDS_OF[age[2]] * 1_000_000)
    if _SECONDS.fullmatch(text) and len(text) != _COMPACT_DATE and int(text) <= _LAST_SECOND:
        return int(text) * 1_000_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text[:64]!r} is no moment: write {FORMS}") from error
    return microseconds(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def microseconds(moment: datetime) -> int:
    """Unix microseconds of an aware datetime, exactly."""
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000_000 + since_epoch.microseconds


def day_of(unix_us: int) -> date:
    """The day of Unix microseconds, in UTC."""
    return _day(unix_us // _DAY_US)


@lru_cache(4)
def _day(days: int) -> date:
    """Rates change by the day, and every request asks for its own: mostly it is the same one."""
    return date.fromordinal(_EPOCH + days)
