"""uvicorn's server, with an end that books what was running.

a signal          no new connections; open requests go on
call_off_after_s  open calls are aborted at their engines, which tell what they used
uvicorn's grace   what is still open is cut off
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import uvicorn

if TYPE_CHECKING:
    import socket


class Stoppable(Protocol):
    """What the server tells of its end."""

    def begin_shutdown(self) -> None:
        """The server takes no new connections from now on."""
        ...

    def call_off(self) -> None:
        """Open calls have to end."""
        ...


class GracefulServer(uvicorn.Server):
    """Tells the application of the shutdown's steps."""

    def __init__(self, config: uvicorn.Config, application: Stoppable, call_off_after_s: float) -> None:
        super().__init__(config)
        self._application = application
        self._call_off_after_s = call_off_after_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, first as they are, then called off."""
        self._application.begin_shutdown()
        timer = asyncio.get_running_loop().call_later(self._call_off_after_s, self._application.call_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
