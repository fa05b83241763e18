"""How far a request's context may be compacted: its team's mode, or a lower one that it asks for."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.lowered import lowered

if TYPE_CHECKING:
    from ctxgate.gateway.config import Config, Key
    from ctxgate.gateway.flow import Inbound

COMPACTION_HEADER: Final = "x-ctxgate-compaction"


class Mode(StrEnum):
    """When a conversation is compacted, the least first. Each does what the ones before it do."""

    OFF = "off"
    WINDOW = "window"
    AUTO = "auto"


class Summarizer(StrEnum):
    """Who writes summaries."""

    WARM_SUFFIX = "warm_suffix"
    EXTRACTIVE = "extractive"
    OFF = "off"


MODES: Final = tuple(Mode)
SUMMARIZERS: Final = tuple(Summarizer)


def mode_of(inbound: Inbound, key: Key, config: Config) -> Mode:
    """The team's mode, or a lower one that the request asks for. Raises `Refused` naming the header."""
    team = config.teams.get(key.team)
    allowed = Mode.OFF if team is None else Mode(team.context.compaction)
    return lowered(inbound.headers, COMPACTION_HEADER, allowed, "mode")
