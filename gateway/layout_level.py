"""Which layout policy a request gets: its team's, at its level or a lower one that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.policy import Level, Policy
from ctxgate.gateway.lowered import lowered

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
    return lowered(inbound.headers, LAYOUT_HEADER, allowed, "level")
