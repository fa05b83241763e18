"""Waits for the ledger that end even where it does not answer.

A timer of its own would cost an answer more than the wait it bounds, so all waits share one.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class Patience:
    """Waits at most `seconds` for a step of the ledger. Belongs to one event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._steps: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, step: asyncio.Future[Any] | None) -> None:
        """Return once the step is done, however it ended, or is no longer waited for by anyone.

        A step that takes too long is ended with no result: what it does goes on, but nobody hears of it.
        """
        if step is None or step.done():
            return
        loop, steps = step.get_loop(), self._steps
        while steps and steps[0][1].done():
            steps.popleft()
        steps.append((loop.time() + self._seconds, step))
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look, loop)
        with suppress(Exception):  # the ledger has told of it, and keeps what it could not write
            await step

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what has waited too long, and look again when the next one will have."""
        steps, now = self._steps, loop.time()
        while steps and (steps[0][1].done() or steps[0][0] <= now):
            step = steps.popleft()[1]
            if not step.done():
                step.set_result(None)
        self._timer = loop.call_at(steps[0][0], self._look, loop) if steps else None
