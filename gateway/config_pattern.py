"""Regular expressions in a configuration file: read, compiled, and refused where they cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.expressions import LONGEST, BadExpression, Expression
from ctxgate.gateway.config_kinds import Scalar, text

if TYPE_CHECKING:
    from ctxgate.gateway.config_yaml import Place


def compiled(place: Place) -> Expression:
    """The expression at a place; `^` and `$` stand for the ends of lines."""
    value = text(place, "a regular expression")
    try:
        return Expression.compile(value)
    except BadExpression as error:
        place.fail(str(error))


EXPRESSION: Final = Scalar(
    compiled,
    f"regular expression of RE2, at most {LONGEST} characters",
    {"type": "string", "minLength": 1, "maxLength": LONGEST},
)
