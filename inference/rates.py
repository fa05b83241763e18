"""Rates of a pool and the one function that prices a usage record.

Amounts are integer nano-dollars (1 USD = 10**9); rates are integer nano-dollars per million tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date


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


@dataclass(frozen=True, slots=True)
class Charge:
    """Nano-dollars per component; a component is None where its token count is unknown.

    `total` is None when nothing is known. `exact` says that every priced component was measured.
    """

    uncached: int | None
    cached: int | None
    output: int | None
    total: int | None
    exact: bool
    rates_effective: date
