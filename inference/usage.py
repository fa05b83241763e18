"""What one model call consumed, in one record, whatever dialect reported it.

`prompt = uncached + cached`; `written` is the part of `uncached` that the engine newly wrote to its
prefix cache; `reasoning` is the part of `output` spent on thinking. Every figure carries how it is
known: an engine's own zero is a measurement, an absent figure is unknown, and the two never mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Certainty(StrEnum):
    """How a token count is known."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Count:
    """A number of tokens and how it is known; `value` is None exactly when it is unknown."""

    value: int | None
    certainty: Certainty

    def __post_init__(self) -> None:
        if (self.value is None) != (self.certainty is Certainty.UNKNOWN):
            raise ValueError("a count has a value unless it is unknown")
        if self.value is not None and self.value < 0:
            raise ValueError("a token count is never negative")


UNKNOWN: Final = Count(None, Certainty.UNKNOWN)


def measured(tokens: int) -> Count:
    """A count the engine reported."""
    return Count(tokens, Certainty.MEASURED)


def estimated(tokens: int) -> Count:
    """A count derived from sizes or samples, not reported."""
    return Count(tokens, Certainty.ESTIMATED)


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one attempt. `written` lies inside `uncached`, `reasoning` inside `output`."""

    uncached: Count
    cached: Count
    output: Count
    reasoning: Count = UNKNOWN
    written: Count = UNKNOWN

    @property
    def prompt(self) -> int | None:
        """Prompt tokens, or None while either part is unknown."""
        if self.uncached.value is None or self.cached.value is None:
            return None
        return self.uncached.value + self.cached.value


NOTHING_KNOWN: Final = Usage(UNKNOWN, UNKNOWN, UNKNOWN)
NOTHING_USED: Final = Usage(measured(0), measured(0), measured(0), measured(0), measured(0))
