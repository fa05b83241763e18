"""Prices and windows of hosted models, from the catalogue that LiteLLM's package carries.

The catalogue is read as the file it is: importing LiteLLM takes seconds, its JSON milliseconds. Prices stand
there as dollars per token in binary floating point; the shortest decimal that reads as the same number is
what was meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxgate.inference.rates import NANO_PER_DOLLAR, TOKENS_PER_RATE, RateCard, Rates

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

_FILE: Final = "model_prices_and_context_window_backup.json"
_TIER: Final = re.compile(r"input_cost_per_token_above_(\d{1,6})k_tokens")
_PRICES: Final = {
    "uncached": "input_cost_per_token",
    "cached": "cache_read_input_token_cost",
    "output": "output_cost_per_token",
    "written": "cache_creation_input_token_cost",
}


class NoCatalogue(Exception):
    """LiteLLM is not installed, or its package has no catalogue that can be read."""


@dataclass(frozen=True, slots=True)
class Listed:
    """What the catalogue says of one model: nano-dollars per million tokens by tier, and tokens.

    `tiers`: lower edge in prompt tokens (0 for the first) -> uncached, cached, output, written. `window` is
    the longest prompt; None where it is not listed.
    """

    tiers: tuple[tuple[int, tuple[int, int, int, int]], ...]
    window: int | None

    def card(self, day: date) -> RateCard:
        """The prices as one version of rates, valid from `day` on."""
        return RateCard(
            (tuple(Rates(*prices, effective=day, above_prompt_tokens=e) for e, prices in self.tiers),)
        )


def installed() -> bool:
    """Whether LiteLLM is there; it is not imported."""
    return find_spec("litellm") is not None


def listed(model: str) -> Listed | None:
    """What the catalogue says of a model, by LiteLLM's name ("openai/NAME"); None where it has no prices.

    Raises `NoCatalogue`.
    """
    return read_entry(_entry(_catalogue(), model))


def _entry(catalogue: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """A model's entry: under its whole name, else without its provider where the entry is that provider's."""
    entry = catalogue.get(model)
    if not isinstance(entry, dict):
        provider, _, name = model.partition("/")
        entry = catalogue.get(name)
        if not isinstance(entry, dict) or entry.get("litellm_provider") != provider:
            return {}
    return entry


@cache
def _catalogue() -> Mapping[str, Any]:
    spec = find_spec("litellm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            found = json.loads((Path(folder) / _FILE).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    raise NoCatalogue


def read_entry(entry: Mapping[str, Any]) -> Listed | None:
    """One entry of the catalogue; None without a price of input and output."""
    base = _prices(entry, "", None)
    if base is None:
        return None
    edges = sorted({int(found[1]) for name in entry if (found := _TIER.fullmatch(name))})
    tiers = [(0, base)]
    for edge in edges:
        prices = _prices(entry, f"_above_{edge}k_tokens", tiers[-1][1])
        if prices is not None:
            tiers.append((edge * 1000, prices))
    window = entry.get("max_input_tokens") or entry.get("max_tokens")
    return Listed(tuple(tiers), window if isinstance(window, int) else None)


def _prices(
    entry: Mapping[str, Any], suffix: str, below: tuple[int, int, int, int] | None
) -> tuple[int, int, int, int] | None:
    """The four prices of a tier; one that is not named is the input's, output's that of the tier below.

    A cached token that is listed above the input's price is priced as input: it is never dearer.
    """
    told = {name: _nano(entry.get(field + suffix)) for name, field in _PRICES.items()}
    uncached = told["uncached"]
    output = told["output"] if told["output"] is not None or below is None else below[2]
    if uncached is None or output is None:
        return None
    cached, written = told["cached"], told["written"]
    return (
        uncached,
        uncached if cached is None else min(cached, uncached),
        output,
        uncached if written is None else written,
    )


def _nano(usd_per_token: object) -> int | None:
    """Nano-dollars per million tokens; None for what is no price."""
    if isinstance(usd_per_token, bool) or not isinstance(usd_per_token, int | float) or usd_per_token < 0:
        return None
    exact = Decimal(repr(usd_per_token)) * NANO_PER_DOLLAR * TOKENS_PER_RATE
    return int(exact.to_integral_value(ROUND_HALF_UP))
