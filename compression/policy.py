"""How far a request's prompt may be laid out anew."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.compression.rules import ALL_RULES
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from ctxgate.compression.expressions import Expression
    from ctxgate.compression.rules import Rule
    from ctxgate.compression.volatile import VolatileKind


class Level(StrEnum):
    """The levels of layout, the least first. Each does what the ones before it do."""

    OFF = "off"
    SAFE = "safe"
    DECLARED = "declared"
    LEARNED = "learned"


LEVELS: Final = tuple(Level)


class Policy(Record, frozen=True):
    """What layout may do to one request.

    `rules`: the rewrites that the pool's template allows. `kinds` and `patterns` declare volatile text of
    the head: what the detector finds of these kinds, and what these expressions match.
    """

    level: Level = Level.SAFE
    rules: frozenset[Rule] = ALL_RULES
    kinds: frozenset[VolatileKind] = frozenset()
    patterns: tuple[Expression, ...] = ()

    def moves(self) -> bool:
        """Whether parts of the prompt may change their place."""
        return self.level in (Level.DECLARED, Level.LEARNED)


SAFE: Final = Policy()
