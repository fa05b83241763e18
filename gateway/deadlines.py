"""Deadlines of many exchanges on one timer: they move with every chunk, and hardly any is ever reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio


class Watched(Protocol):
    """What has a deadline: seconds of its event loop's clock."""

    until: float

    def overdue(self) -> None:
        """Called once `until` has come; afterwards it lies in the future, or the thing is forgotten."""
        ...


class Deadlines:
    """Looks after what is added, until it is discarded. Belongs to one event loop.

    Moving a deadline away costs nothing: it is looked at when the earliest one known has come.
    """

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watched: Watched, loop: asyncio.AbstractEventLoop) -> None:
        """Watch from now on."""
        self._watched.add(watched)
        self.sooner(watched, loop)

    def discard(self, watched: Watched) -> None:
        """Watch no longer; idempotent."""
        self._watched.discard(watched)

    def sooner(self, watched: Watched, loop: asyncio.AbstractEventLoop) -> None:
        """Notice that its deadline may have come nearer."""
        timer = self._timer
        if timer is not None:
            if timer.when() <= watched.until:
                return
            timer.cancel()
        self._timer = loop.call_at(watched.until, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        try:
            for watched in [one for one in self._watched if one.until <= now]:
                watched.overdue()
        finally:
            if self._watched:
                self.sooner(min(self._watched, key=lambda one: one.until), loop)
