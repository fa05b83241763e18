"""What exact strings are: their kinds, one in a message, one in a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class IdentifierKind(StrEnum):
    """What an exact string is; in the order in which a block lists them."""

    RULE = "rule"
    ERROR = "error"
    COMMAND = "command"
    PATH = "path"
    URL = "url"
    ID = "id"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Found:
    """An exact string in one message. `told`: the user or a call names it, not only a tool's output."""

    kind: IdentifierKind
    text: str
    told: bool


@dataclass(frozen=True, slots=True)
class Identifier:
    """An exact string of a conversation: in how many messages it stands, and in which one last."""

    kind: IdentifierKind
    text: str
    count: int
    last: int
    told: bool
