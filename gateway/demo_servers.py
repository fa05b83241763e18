"""The demo's processes: two twins and the gateway, each a `ctxgate` command of its own.

    async with Servers(folder) as servers:               nothing runs yet
        url = await servers.start(name, arguments)       it runs and is ready
    ...                                                  every child has ended, however the block was left

The children end even where this process is killed (`demo_child`). Each prints the URL that it listens on.
One that is not ready in time, or ends before, raises `ServerFailed` with the last lines that it wrote.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING, Final, Self

import aiohttp

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Sequence
    from pathlib import Path

_URL: Final = re.compile(r"http://127\.0\.0\.1:\d+")
_READY_WITHIN_S: Final = 60.0
_ASK_EVERY_S: Final = 0.05
_ASK_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)
_END_WITHIN_S: Final = 5.0
_LAST_LINES: Final = 15


class ServerFailed(Exception):
    """A child did not come up."""


class Servers:
    """Starts `ctxgate` commands and ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, Process] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(_end(child) for child in self._children.values()))

    async def start(self, name: str, arguments: Sequence[str], *, ready: str = "/health") -> str:
        """Start `ctxgate ARGUMENTS`, wait until the path `ready` answers 200, and return the URL."""
        await self.spawn(name, arguments)
        return await self.wait(name, ready)

    async def spawn(self, name: str, arguments: Sequence[str]) -> None:
        """Start `ctxgate ARGUMENTS` without waiting for it."""
        with self._log(name).open("wb") as output:
            # In a session of its own: Ctrl-C reaches the demo alone, which ends its children in order.
            self._children[name] = await asyncio.create_subprocess_exec(
                *child_command(arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def wait(self, name: str, ready: str = "/health") -> str:
        """Wait until the path `ready` of a child answers 200; return its URL. Raises `ServerFailed`."""
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                return await self._ready(name, self._children[name], ready)
        except TimeoutError:
            raise ServerFailed(
                f"{name} is not ready after {_READY_WITHIN_S:.0f} s\n{self._tail(name)}"
            ) from None

    async def _ready(self, name: str, child: Process, path: str) -> str:
        """The URL that the child printed, once it answers there."""
        async with aiohttp.ClientSession(timeout=_ASK_TIMEOUT) as session:
            while child.returncode is None:
                url = _URL.search(self._log(name).read_text(errors="replace"))
                if url and await _answers(session, url[0] + path):
                    return url[0]
                await asyncio.sleep(_ASK_EVERY_S)
        raise ServerFailed(f"{name} ended with code {child.returncode}\n{self._tail(name)}")

    async def first_to_end(self) -> str:
        """Wait until a child ends by itself; return what happened."""
        waits = {asyncio.ensure_future(child.wait()): name for name, child in self._children.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        name = waits[done.pop()]
        return f"{name} ended\n{self._tail(name)}"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])


def ctxgate_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a `ctxgate` command in this very interpreter."""
    # -P keeps the working folder off sys.path: its names may shadow the standard library's.
    return [sys.executable, "-P", "-m", "ctxgate.gateway.cli", *arguments]


def child_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a `ctxgate` command that ends with this process."""
    return [sys.executable, "-P", "-m", "ctxgate.gateway.demo_child", str(os.getpid()), *arguments]


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _end(child: Process) -> None:
    """Ask a child to end, and make it."""
    if child.returncode is not None:
        return
    try:
        child.terminate()
        async with asyncio.timeout(_END_WITHIN_S):
            await child.wait()
    except ProcessLookupError:
        pass  # it has just ended by itself
    except TimeoutError:
        child.kill()
        await child.wait()
