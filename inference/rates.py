"""Rates of a pool and the one function that prices a usage record.

Amounts are integer nano-dollars (1 USD = 10**9); rates are integer nano-dollars per million tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record
from ctxgate.inference.usage import Certainty, Usage, measured

if TYPE_CHECKING:
    from datetime import date

NANO_PER_DOLLAR: Final = 10**9
TOKENS_PER_RATE: Final = 10**6


@dataclass(frozen=True, slots=True)
class Rates:
    """Nano-dollars per million tokens, valid from `effective` on.

    `written` prices prompt tokens newly written to the prefix cache (equal to `uncached` on vLLM).
    `above_prompt_tokens` is the tier's lower edge: these rates price a whole request whose prompt,
    cached tokens included, is longer than that.
    """

    uncached: int
    cached: int
    output: int
    written: int
    effective: date
    above_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RateCard:
    """A pool's rates: dated versions, each with optional long-context tiers.

    `versions` holds, by effective date, tuples of `Rates` sorted by `above_prompt_tokens`; the first
    tier of each version starts at 0.
    """

    versions: tuple[tuple[Rates, ...], ...]


class Charge(Record, frozen=True):
    """Nano-dollars per component; a component is None where its token count is unknown.

    `total` is None when nothing is known. `exact` says that every priced component was measured.
    """

    uncached: int | None
    cached: int | None
    output: int | None
    total: int | None
    exact: bool
    rates_effective: date


def rates_at(card: RateCard, day: date, prompt_tokens: int) -> Rates:
    """The rates that price a request of `prompt_tokens` (cached ones included) on `day`.

    The version is the latest one effective on or before `day`; before the first, the first. The tier
    is the highest whose edge the prompt exceeds; it replaces all rates, the cached one too.
    """
    version = card.versions[0]
    for candidate in card.versions[1:]:
        if candidate[0].effective > day:
            break
        version = candidate
    rates = version[0]
    for tier in version[1:]:
        if prompt_tokens > tier.above_prompt_tokens:
            rates = tier
    return rates


def charge(usage: Usage, card: RateCard, day: date) -> Charge:
    """Price a usage record: the only place where tokens become money.

    Each of the three components is computed exactly and rounded once, half up, to a nano-dollar.
    Written tokens belong to the uncached component, at their own rate; where their number is unknown
    the whole component goes at the uncached rate. A prompt of unknown length is priced by the base tier.
    """
    rates = rates_at(card, day, usage.prompt or 0)
    counts = (usage.uncached, usage.cached, usage.output)
    uncached = _uncached_nano(usage.uncached.value, usage.written.value or 0, rates)
    cached = _nano(usage.cached.value, rates.cached)
    output = _nano(usage.output.value, rates.output)
    known = [part for part in (uncached, cached, output) if part is not None]
    return Charge(
        uncached=uncached,
        cached=cached,
        output=output,
        total=sum(known) if known else None,
        exact=all(count.certainty is Certainty.MEASURED for count in counts),
        rates_effective=rates.effective,
    )


def miss_nano(prompt: int, cached: int, lost: int, card: RateCard, day: date) -> int:
    """Nano-dollars that `lost` tokens of a prompt, computed anew, cost more than as cached ones."""
    paid, unbroken = (
        charge(Usage(measured(prompt - hit), measured(hit), measured(0)), card, day).total or 0
        for hit in (cached, cached + lost)
    )
    return paid - unbroken


def _uncached_nano(tokens: int | None, written: int, rates: Rates) -> int | None:
    if tokens is None:
        return None
    return _round((tokens - written) * rates.uncached + written * rates.written)


def _nano(tokens: int | None, rate: int) -> int | None:
    return None if tokens is None else _round(tokens * rate)


def _round(micro_nano: int) -> int:
    """Half up; amounts are never negative."""
    return (micro_nano + TOKENS_PER_RATE // 2) // TOKENS_PER_RATE


def format_usd(nano: int) -> str:
    """The exact amount in dollars as a decimal string without trailing zeros: "0.011684"."""
    whole, fraction = divmod(abs(nano), NANO_PER_DOLLAR)
    sign = "-" if nano < 0 else ""
    digits = f"{fraction:09d}".rstrip("0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"
