"""The table of what a recorded session costs under each compaction policy, at several rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression.schedule import TRIGGERS, compare
from ctxgate.gateway.replay_table import table
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.schedule import Outcome, Step
    from ctxgate.compression.window import Terms
    from ctxgate.inference.rates import Rates

_NANO_PER_MILLI: Final = 10**6


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the terms, and what the session costs by each policy, the optimum last."""

    terms: Terms
    outcomes: tuple[Outcome, ...]

    def ratio(self, policy: str) -> float | None:
        """A policy's amount over the optimum's; None where the optimum is 0. Raises KeyError."""
        amount = {each.policy: each.amount for each in self.outcomes}[policy]
        best = self.outcomes[-1].amount
        return amount / best if best else None


def rows(steps: Sequence[Step], terms: Sequence[Terms], triggers: Sequence[int] = TRIGGERS) -> list[Row]:
    """One row for each of `terms`."""
    return [Row(each, compare(steps, each, triggers)) for each in terms]


def text(found: Sequence[Row], *, color: bool = False) -> str:
    """Dollars to a tenth of a cent; compactions in brackets where the policy chose the moment itself."""
    if not found:
        return ""
    names = [outcome.policy for outcome in found[0].outcomes]
    headers = ("u/c/w/o $ per million", *names, "shipped/optimum")
    return table(headers, [_cells(row) for row in found], color=color)


def _cells(row: Row) -> list[str]:
    ratio = row.ratio("shipped")
    amounts = [
        dollars(outcome.nano)
        + ("" if outcome.policy.isdigit() or not outcome.cuts else f" ({len(outcome.cuts)})")
        for outcome in row.outcomes
    ]
    return [rates_of(row.terms.rates), *amounts, "-" if ratio is None else f"{ratio:.3f}"]


def rates_of(rates: Rates) -> str:
    """`uncached/cached/written/output` in dollars per million tokens."""
    return "/".join(map(format_usd, (rates.uncached, rates.cached, rates.written, rates.output)))


def dollars(nano: int) -> str:
    """Nano-dollars as dollars with three decimals, rounded half up."""
    milli = (nano + _NANO_PER_MILLI // 2) // _NANO_PER_MILLI
    return f"{milli // 1000}.{milli % 1000:03d}"
