"""Settings of a team that a request may lower for itself, by a header, but never raise."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from ctxgate.gateway.errors import Kind, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

E = TypeVar("E", bound=StrEnum)


def lowered(headers: Mapping[str, str], header: str, allowed: E, noun: str) -> E:
    """The team's choice, or the lower one that the header asks for. Raises `Refused` naming the header.

    The members of the enumeration stand in their order, the lowest first; `noun` says what the team has.
    """
    asked = headers.get(header)
    if asked is None:
        return allowed
    choices = list(type(allowed))
    asked = asked.strip()
    if asked not in choices:
        message = f"Header '{header}' must be one of: {', '.join(choices)}."
        raise Refused(Kind.INVALID_VALUE, message, header)
    chosen = type(allowed)(asked)
    if choices.index(chosen) > choices.index(allowed):
        message = f"Header '{header}' asks for '{chosen}'; the team's {noun} is '{allowed}'."
        raise Refused(Kind.INVALID_VALUE, message, header)
    return chosen
