"""Pure work that takes long, done in a process of its own.

A thread would not do: it shares the interpreter's lock with the event loop, so that every request would
wait for it again and again. The process is started for one piece of work and ends with it: it holds no
memory in between, nothing it meets can harm the gateway, and it is ended by killing it.

    made: bytes = await services.apart.run("ctxgate.compression.summary_record:made", packed)
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Final

SMALL_BYTES: Final = 48 * 2**10
"""Work on less takes a few milliseconds: it is done in a thread."""

WITHIN_S: Final = 120.0
_COMMAND: Final = (sys.executable, "-P", "-m", "ctxgate.gateway.apart_worker")


class ApartFailed(Exception):
    """The work was not done: its process failed, or took too long. The message holds nothing of the work."""


class Apart:
    """Does work in other processes, one at a time: it is never urgent, and others want the cores too."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        self._within_s = within_s
        self._turn = asyncio.Semaphore(1)

    async def run(self, function: str, work: bytes) -> bytes:
        """The result of `function` ("module:name", from bytes to bytes) on `work`. Raises `ApartFailed`.

        Once cancelled it returns at once, and the process is gone.
        """
        async with self._turn:
            try:
                process = await asyncio.to_thread(_started, function)
            except OSError as error:  # no memory, or too many processes
                raise ApartFailed(f"its process could not be started: {type(error).__name__}") from None
            try:
                async with asyncio.timeout(self._within_s):
                    made, _ = await asyncio.to_thread(process.communicate, work)
            except TimeoutError:
                raise ApartFailed("it took too long") from None
            finally:
                if process.returncode is None:
                    process.kill()  # the thread that talks to it takes note of its end
        if process.returncode != 0:
            raise ApartFailed(f"its process ended with code {process.returncode}")
        return made


def _started(function: str) -> subprocess.Popen[bytes]:
    # What it writes to its standard error may quote prompts.
    return subprocess.Popen(
        [*_COMMAND, function], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
