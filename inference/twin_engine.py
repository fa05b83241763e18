"""The engine model in real time: a loop that lets each step take as long as it says.

One task runs the steps; requests put jobs in and read their mailbox. Everything happens on one event
loop, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxgate.inference.twin_job import Output

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from ctxgate.inference import kv_events
    from ctxgate.inference.twin import Twin
    from ctxgate.inference.twin_job import Job
    from ctxgate.inference.twin_text import Answer, Delta


@dataclass(frozen=True, slots=True)
class Aborted:
    """A job that was aborted by its id."""

    id: str


Event = Output | Aborted


class Mailbox:
    """Events of one request, in order. A slow reader finds several at once."""

    __slots__ = ("_events", "_filled")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event and wake the reader."""
        self._events.append(event)
        self._filled.set()

    async def take(self) -> list[Event]:
        """All events since the last call, at least one."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events


class TwinEngine:
    """Runs a twin's steps and delivers their tokens."""

    def __init__(self, twin: Twin, clock: Callable[[], float] = time.monotonic) -> None:
        self.twin = twin
        self.clock = clock
        self.publish: Callable[[Sequence[kv_events.Event]], None] | None = (
            None  # takes the cache events of each step
        )
        self._wake = asyncio.Event()
        self._mailboxes: dict[str, Mailbox] = {}
        self._external: defaultdict[str, list[str]] = defaultdict(list)
        self._serial = itertools.count()

    @property
    def unfinished(self) -> int:
        """Jobs in the batch or in the queue."""
        return self.twin.running + self.twin.waiting

    def job_id(self) -> str:
        """A new id; outside ids may be used twice, these are not."""
        return str(next(self._serial))

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            step = self.twin.begin(self.clock())
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(max(0.0, step.ends - self.clock()))
            outputs = self.twin.complete(self.clock())
            if self.publish is not None and (events := self.twin.take_events()):
                self.publish(events)
            for output in outputs:
                self._mailboxes[output.id].put(output)

    def submit(self, jobs: Mapping[str, Sequence[Job]]) -> Mailbox:
        """Queue jobs, grouped by the outside id that aborts them; one mailbox receives all."""
        mailbox = Mailbox()
        now = self.clock()
        for external, group in jobs.items():
            for job in group:
                self.twin.submit(job, now)
                self._mailboxes[job.id] = mailbox
                self._external[external].append(job.id)
        self._wake.set()
        return mailbox

    def abort(self, externals: Iterable[str]) -> None:
        """Abort every job under these outside ids; unknown ones are ignored."""
        for external in externals:
            for job in self._external.pop(external, ()):
                if self.twin.drop(job):
                    self._mailboxes[job].put(Aborted(job))

    def stop(self, job: str) -> None:
        """End a job whose text met a stop string; it counts as finished."""
        self.twin.drop(job, "stop")

    def release(self, jobs: Mapping[str, Sequence[Job]]) -> None:
        """Forget a request's jobs, and drop those that still run."""
        for external, group in jobs.items():
            for job in group:
                self.twin.drop(job.id)
                del self._mailboxes[job.id]
                self._unlink(external, job.id)

    def _unlink(self, external: str, job: str) -> None:
        known = self._external.get(external)
        if known is None:
            return
        if job in known:
            known.remove(job)
        if not known:
            del self._external[external]


async def deltas(
    engine: TwinEngine, mailbox: Mailbox, answers: Mapping[str, Answer]
) -> AsyncIterator[list[tuple[Answer, Delta]]]:
    """What is new in each answer, batch by batch, until all have ended. Keys are job ids."""
    while any(answer.finish is None for answer in answers.values()):
        batch: list[tuple[Answer, Delta]] = []
        for job, events in _by_job(await mailbox.take()).items():
            answer = answers[job]
            if answer.finish is not None:
                continue
            outputs = [event for event in events if isinstance(event, Output)]
            if outputs:
                batch.append((answer, answer.feed(outputs)))
            if answer.stop_reason is not None:
                engine.stop(job)
            if answer.finish is None and any(isinstance(event, Aborted) for event in events):
                batch.append((answer, answer.abort()))
        if batch:
            yield batch


def _by_job(events: Iterable[Event]) -> dict[str, list[Event]]:
    grouped: dict[str, list[Event]] = {}
    for event in events:
        grouped.setdefault(event.id, []).append(event)
    return grouped
