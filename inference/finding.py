"""What a probe of a replica can find: a closed set, apart from the probing so that pure code can use it."""

from __future__ import annotations

from enum import Enum, auto


class Finding(Enum):
    """What a replica's health endpoint said."""

    WELL = auto()
    UNWELL = auto()  # an answer other than 200
    REFUSED = auto()  # no connection: nothing listens there
    SILENT = auto()  # no answer in time, or it broke off
