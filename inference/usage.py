"""What one model call consumed, in one record, whatever dialect reported it.

`prompt = uncached + cached`; `written` is the part of `uncached` that the engine newly wrote to its
prefix cache; `reasoning` is the part of `output` spent on thinking. Every figure carries how it is
known: an engine's own zero is a measurement, an absent figure is unknown, and the two never mix.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ctxgate.inference.record import Record


class Certainty(StrEnum):
    """How a token count is known."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    UNKNOWN = "unknown"


class Count(Record, frozen=True):
    """A number of tokens and how it is known; `value` is None exactly when it is unknown."""

    value: int | None
    certainty: Certainty

    def __post_init__(self) -> None:
        if (self.value is None) != (self.certainty is Certainty.UNKNOWN):
            raise ValueError("a count has a value unless it is unknown")
        if self.value is not None and self.value < 0:
            raise ValueError("a token count is never negative")

    @property
    def reported(self) -> int | None:
        """The value, where the engine told it; None where it is estimated or unknown."""
        return self.value if self.certainty is Certainty.MEASURED else None


UNKNOWN: Final = Count(None, Certainty.UNKNOWN)


def measured(tokens: int) -> Count:
    """A count the engine reported."""
    return Count(tokens, Certainty.MEASURED)


def estimated(tokens: int) -> Count:
    """A count derived from sizes or samples, not reported."""
    return Count(tokens, Certainty.ESTIMATED)


class Usage(Record, frozen=True):
    """The tokens of one attempt. `written` lies inside `uncached`, `reasoning` inside `output`.

    `prompt_total` is set where the engine told the whole prompt but not its cached part; it is not a
    third part to add.
    """

    uncached: Count
    cached: Count
    output: Count
    reasoning: Count = UNKNOWN
    written: Count = UNKNOWN
    prompt_total: Count = UNKNOWN

    def __post_init__(self) -> None:
        if _exceeds(self.written, self.uncached) or _exceeds(self.reasoning, self.output):
            raise ValueError("a part of a token count is larger than the whole")

    @property
    def prompt(self) -> int | None:
        """All prompt tokens, cached ones included, or None where they are unknown."""
        if self.uncached.value is None or self.cached.value is None:
            return self.prompt_total.value
        return self.uncached.value + self.cached.value


def _exceeds(part: Count, whole: Count) -> bool:
    return part.value is not None and whole.value is not None and part.value > whole.value


NOTHING_KNOWN: Final = Usage(UNKNOWN, UNKNOWN, UNKNOWN)
NOTHING_USED: Final = Usage(measured(0), measured(0), measured(0), measured(0), measured(0))
