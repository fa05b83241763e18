"""The recall process as the gateway sees it: started when first needed, started again when it died.

What is to be indexed waits in a queue, which whoever fills it keeps within a bound; questions go first.
When the process dies, everything it knew is gone, and what it is asked about next is unknown to it:
whoever asks can have it indexed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.recall_wire import PREFIX, Ask, Told, framed, length_of, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.gateway.recall_wire import Add, Forget

QUEUE_BYTES: Final = 32 * 2**20
RETRY_DELAYS_S: Final = (0.5, 2.0, 10.0, 60.0, 300.0)  # the last one repeats
_ENDING_S: Final = 2.0
_QUIET: Final[Mapping[str, str]] = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

log = logging.getLogger(__name__)


def command(model: str | None, python: str = sys.executable) -> tuple[str, ...]:
    """How the process is started; `model` None: it answers by terms alone."""
    start = (python, "-m", "ctxgate.gateway.recall_worker")
    return start if model is None else (*start, "--model", model)


class RecallProcess:
    """Belongs to one event loop. Nothing is started before something is sent."""

    def __init__(
        self,
        start: Sequence[str],
        *,
        queue_bytes: int = QUEUE_BYTES,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self._start = start
        self._queue_bytes = queue_bytes
        self._retry_delays_s = retry_delays_s
        self._questions: deque[bytes] = deque()
        self._work: deque[bytes] = deque()
        self._size = 0
        self._change = asyncio.Event()
        self._sent = asyncio.Event()
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Told]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failures = 0  # in a row
        self.starts = 0
        self.pid: int | None = None

    def send(self, message: Add | Forget) -> None:
        """Have something done sometime."""
        if not self._closed:
            frame = framed(message)
            self._work.append(frame)
            self._size += len(frame)
            self._wake()

    async def room(self) -> None:
        """Wait until what waits to be sent is within the queue's bound."""
        while self._size > self._queue_bytes:
            self._sent.clear()
            await self._sent.wait()

    async def ask(
        self,
        conversation: bytes,
        text: str,
        count: int,
        within_s: float,
        among: frozenset[str] | None = None,
    ) -> Told | None:
        """What the process tells within that time, else None. `among`: see `recall_wire.Ask`."""
        if self._closed:
            return None
        number = next(self._numbers)
        future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._questions.append(framed(Ask(number, conversation, text, count, within_s, among)))
        self._wake()
        try:
            async with asyncio.timeout(within_s):
                return await future
        except (TimeoutError, ConnectionError):
            return None
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """End the process; what is not done stays undone. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_asked()

    def _wake(self) -> None:
        self._change.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Keep a process running while there is something to do."""
        while True:
            await self._change.wait()
            try:
                await self._serve()
            except OSError as error:
                log.warning("the recall process cannot be started: %s", error.strerror)
            self._fail_asked()
            self._forget_work()
            delay = self._retry_delays_s[min(self._failures, len(self._retry_delays_s) - 1)]
            self._failures += 1
            log.warning("the recall process ended; what it indexed is gone; another one in %.1f s", delay)
            await asyncio.sleep(delay)

    async def _serve(self) -> None:
        """Start a process and speak with it until it ends."""
        process = await asyncio.create_subprocess_exec(
            *self._start,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        self.starts += 1
        self.pid = process.pid
        assert process.stdin is not None  # noqa: S101 - narrows types: both are pipes
        assert process.stdout is not None  # noqa: S101 - as above
        hearing = asyncio.create_task(self._hear(process.stdout))
        speaking = asyncio.create_task(self._speak(process.stdin))
        try:
            await asyncio.wait((hearing, speaking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (hearing, speaking):
                task.cancel()
            await asyncio.gather(hearing, speaking, return_exceptions=True)
            await _ended(process)
            self.pid = None

    async def _speak(self, pipe: asyncio.StreamWriter) -> None:
        while True:
            await self._change.wait()
            while self._questions or self._work:
                if self._questions:
                    frame = self._questions.popleft()
                else:
                    frame = self._work.popleft()
                    self._size -= len(frame)
                    self._sent.set()
                pipe.write(frame)
                await pipe.drain()
            self._change.clear()

    async def _hear(self, pipe: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                answer = told(await pipe.readexactly(length_of(await pipe.readexactly(PREFIX))))
                self._failures = 0
                future = self._asked.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)

    def _forget_work(self) -> None:
        """The rest of a conversation is of no use to a process that did not get its beginning."""
        self._work.clear()
        self._size = 0
        self._sent.set()
        self._change.clear()

    def _fail_asked(self) -> None:
        self._questions.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError("the recall process ended"))


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was told to end by the end of its input; after a while it is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_ENDING_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """The gateway's own, with the libraries kept quiet and to a quarter of the machine."""
    threads = str(max(1, (os.cpu_count() or 1) // 4))
    return {"OMP_NUM_THREADS": threads, **os.environ, **_QUIET}
