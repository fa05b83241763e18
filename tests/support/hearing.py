"""What a stream said, of all its events at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.inference.call_filter import Hearing

if TYPE_CHECKING:
    from ctxgate.inference.call_filter import Spoken


def spoken_in(events: bytes) -> Spoken:
    """What whole events of a stream said, of its first choice."""
    hearing = Hearing()
    hearing.take(events)
    return hearing.spoken()
