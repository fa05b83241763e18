"""Which layout policy a request gets: its team's, at its level or a lower one that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.policy import LEVELS, Level, Policy
from ctxgate.gateway.errors import Kind, Refused

if TYPE_CHECKING:
    from ctxgate.compression.rules import Rule
    from ctxgate.gateway.config import Config, Key
    from ctxgate.gateway.flow import Inbound

LAYOUT_HEADER: Final = "x-ctxgate-layout"


def policy_of(inbound: Inbound, key: Key, config: Config, rules: frozenset[Rule]) -> Policy:
    """What layout may do to a request, on a template that allows these rules. Raises `Refused`."""
    level = level_of(inbound, key, config)
    team = config.teams.get(key.team)
    if team is None:
        return Policy(level, rules)
    return Policy(level, rules, team.kinds, team.patterns)


def level_of(inbound: Inbound, key: Key, config: Config) -> Level:
    """The team's level, or a lower one that the request asks for. Raises `Refused` naming the header."""
    team = config.teams.get(key.team)
    allowed = Level.OFF if team is None else Level(team.layout)
    asked = inbound.headers.get(LAYOUT_HEADER)
    if asked is None:
        return allowed
    asked = asked.strip()
    if asked not in LEVELS:
        message = f"Header '{LAYOUT_HEADER}' must be one of: {', '.join(LEVELS)}."
        raise Refused(Kind.INVALID_VALUE, message, LAYOUT_HEADER)
    level = Level(asked)
    if LEVELS.index(level) > LEVELS.index(allowed):
        message = f"Header '{LAYOUT_HEADER}' asks for '{level}'; the team's level is '{allowed}'."
        raise Refused(Kind.INVALID_VALUE, message, LAYOUT_HEADER)
    return level
