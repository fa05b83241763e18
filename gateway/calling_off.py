"""Ending a call at its engine before its answer is whole, and the time an exchange may take.

A call is called off when its client has left, when it takes too long, or when the gateway is stopped.
An engine that can abort by id closes the call with its exact usage, so the exchange goes on for a
bounded time to read it; one that cannot is hung up on.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.flow import Surface

if TYPE_CHECKING:
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.services import Services

_ABORT_AGAIN_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0)
_MOST_IDS: Final = 1024  # a call of more prompts is hung up on: its list of ids would be a burden of its own


class Cause(Enum):
    """Why a call was called off."""

    CLIENT_GONE = auto()
    TOO_LATE = auto()
    SHUTDOWN = auto()


class CallingOff:
    """Watches the time of one exchange and ends its call. `cause` is None while it may go on.

    The soft limit, `until`, moves with every chunk, but not past the end of the time for the whole exchange;
    the hard one is set when the call is called off.
    """

    def __init__(self, services: Services, held: Held, prompts: int) -> None:
        self._services = services
        self._held = held
        self._prompts = prompts
        self._surface = held.routed.planned.allowed.identified.inbound.surface
        self._loop = asyncio.get_running_loop()
        self.until = 0.0
        self._silent_until = self._last = 0.0
        self._hard: asyncio.Timeout | None = None
        self._aborter: asyncio.Task[None] | None = None
        self.cause: Cause | None = None
        self.writing = False  # bytes are being given to the client

    def begin(self, hard: asyncio.Timeout, seconds: float) -> None:
        """The exchange starts inside `hard`, with a first soft limit."""
        self._hard = hard
        now = self._loop.time()
        self._silent_until = now + seconds
        self._last = now + self._services.config.limits.total_timeout_s
        self.until = min(self._silent_until, self._last)
        self._services.deadlines.add(self, self._loop)
        if self.cause is not None:
            self._end()

    def finish(self) -> None:
        """The exchange is over."""
        self._hard = None
        self._services.deadlines.discard(self)
        if self._aborter is not None:
            self._aborter.cancel()

    def wait_at_most(self, seconds: float) -> None:
        """Move the soft limit."""
        self._silent_until = self._loop.time() + seconds
        until = min(self._silent_until, self._last)
        nearer, self.until = until < self.until, until
        if nearer:
            self._services.deadlines.sooner(self, self._loop)

    def overdue(self) -> None:
        """The soft limit has passed."""
        self._services.deadlines.discard(self)
        if self.writing and self._silent_until <= self._loop.time():
            # It is the client that takes nothing: as good as gone, and in the way of the rest.
            self.cause = self.cause or Cause.CLIENT_GONE
            self._leave_within(0.0)
        else:
            self.call_off(Cause.TOO_LATE)

    def call_off(self, cause: Cause) -> None:
        """End the call at the engine, and stay for its usage as long as the limits allow."""
        if self.cause is None:
            self.cause = cause
            self._end()

    def hang_up(self) -> None:
        """Wait for this call no longer, and for its usage neither."""
        self._leave_within(0.0)

    def _end(self) -> None:
        if self._hard is None:
            return
        self._leave_within(self._services.config.limits.abort_drain_s if self.abortable else 0.0)
        if self.abortable and self._aborter is None:
            self._aborter = self._loop.create_task(self._abort_until_done())

    def _leave_within(self, seconds: float) -> None:
        if self._hard is not None and not self._hard.expired():
            self._hard.reschedule(self._loop.time() + seconds)

    @property
    def abortable(self) -> bool:
        """Whether the engine can end this call by its id."""
        ids = 0 if self._surface is Surface.EMBEDDINGS else self._prompts
        return self._held.routed.pool.abort and 0 < ids <= _MOST_IDS

    async def _abort_until_done(self) -> None:
        """Abort, and again: an engine that is still reading the prompt does not know the id yet."""
        for delay in chain(_ABORT_AGAIN_S, repeat(_ABORT_AGAIN_S[-1])):
            if await self._abort() is False:
                break
            await asyncio.sleep(delay)
        self._leave_within(0.0)  # this replica offers no abort: hang up, which ends the call there

    async def _abort(self) -> bool | None:
        routed = self._held.routed
        headers = self._services.upstream_headers(routed.pool)
        return await self._services.client.abort(routed.replica.url, self._engine_ids(), headers)

    def _engine_ids(self) -> list[str]:
        """The ids vLLM gives the parts of this call."""
        attempt_id = self._held.attempt.attempt_id
        if self._surface is Surface.CHAT:
            return [f"chatcmpl-{attempt_id}"]
        return [f"cmpl-{attempt_id}-{i}" for i in range(self._prompts)]

    def abort_in_background(self) -> None:
        """Make sure that nothing runs on at an engine whose answer was lost."""
        if self.abortable and self._aborter is None:
            self._services.spawn(self._abort())
