"""Regular expressions in a configuration file: read, compiled, and refused where they could run away.

They run on the head of every new prompt, in a process that serves everybody.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_kinds import Scalar, text

if TYPE_CHECKING:
    from ctxgate.gateway.config_yaml import Place

LONGEST: Final = 512
MANY: Final = 16  # repetitions from which on a bounded quantifier counts as an unbounded one

_LEXEME: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?>|\(|\)|[*+]|\{\d*,?\d*\}|.", re.DOTALL)


def compiled(place: Place) -> re.Pattern[str]:
    """The expression at a place; `^` and `$` stand for the ends of lines."""
    value = text(place, "a regular expression")
    if len(value) > LONGEST:
        place.fail(f"is longer than {LONGEST} characters")
    try:
        pattern = re.compile(value, re.MULTILINE)
    except (re.error, OverflowError, RecursionError) as error:
        reason = error.msg if isinstance(error, re.error) else "too large"
        at = (
            f" at its character {error.pos + 1}"
            if isinstance(error, re.error) and error.pos is not None
            else ""
        )
        place.fail(f"is no regular expression: {reason}{at}")
    if pattern.search("") is not None:
        place.fail("matches the empty text, so it would match everywhere")
    if runs_away(value):
        place.fail(
            "repeats a group that itself repeats something: on some texts its time would grow "
            "exponentially. Write one of the two without a repetition, or make the group atomic: (?>...)"
        )
    return pattern


def runs_away(expression: str) -> bool:
    """Whether a valid expression repeats, without bound, a group that holds such a repetition."""
    groups: list[tuple[bool, bool]] = [(False, False)]  # atomic; holds a repetition
    closed = False  # the lexeme before closed a group that holds a repetition
    lexemes: list[str] = _LEXEME.findall(expression)
    for at, lexeme in enumerate(lexemes):
        repeats = _repeats(lexeme) and lexemes[at + 1 : at + 2] != ["+"]
        if repeats and closed:
            return True
        closed = False
        if lexeme in ("(", "(?>"):
            groups.append((lexeme == "(?>", False))
        elif lexeme == ")":
            atomic, holds = groups.pop()
            closed = holds and not atomic
            groups[-1] = (groups[-1][0], groups[-1][1] or closed)
        elif repeats:
            groups[-1] = (groups[-1][0], True)
    return False


def _repeats(lexeme: str) -> bool:
    if lexeme in ("*", "+"):
        return True
    if len(lexeme) < 3 or lexeme[0] != "{":
        return False
    last = lexeme[1:-1].rpartition(",")[2]
    return not last or int(last) >= MANY


EXPRESSION: Final = Scalar(
    compiled,
    f"regular expression of Python, at most {LONGEST} characters",
    {"type": "string", "minLength": 1, "maxLength": LONGEST},
)
