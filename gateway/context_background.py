"""Compactions in the background: between two requests of a conversation, where nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxgate.compression.compaction import Compaction, chosen, joined, newly_left_out
from ctxgate.compression.cut import plan_cut
from ctxgate.compression.recent import Recent
from ctxgate.compression.summary import carrier
from ctxgate.compression.window import failed
from ctxgate.gateway.context_level import Summarizer
from ctxgate.gateway.context_masking import Goal, keep_of, masked, message_tokens
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.summarizing import summarize
from ctxgate.gateway.summary_work import SummaryWork
from ctxgate.inference.lengths import measure
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ctxgate.compression.window import Compact, Terms
    from ctxgate.gateway.context import ContextStage
    from ctxgate.gateway.context_terms import Known
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.services import Services
    from ctxgate.gateway.summarizing import Summarized

log = logging.getLogger(__name__)
REMEMBERED_FAILURES: Final = 100_000
_SPLIT_SHARE: Final = 4  # of the room for the whole prompt, for one message that is larger than it
_TRIES: Final = 8


Summarize: TypeAlias = "Callable[[Services, SummaryWork, str], Awaitable[Summarized | None]]"


class Job(Record, frozen=True):
    """One compaction that was decided on."""

    held: Held
    turn: Turn
    known: Known
    terms: Terms
    decision: Compact
    tokens: Sequence[int]


class Compactor:
    """Makes summaries, at most one at a time for each conversation. Belongs to one event loop."""

    def __init__(self, stage: ContextStage, services: Services, written_by: Summarize = summarize) -> None:
        self._stage = stage
        self._services = services
        self._summarize = written_by
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._waits: Recent[bytes, tuple[int, Compaction | None]] = Recent(REMEMBERED_FAILURES)

    def begin(self, held: Held, turn: Turn, known: Known, terms: Terms, decision: Compact) -> None:
        """Compact a conversation that was answered, unless that is under way, or came to nothing just now."""
        if not self._running.keys().isdisjoint(turn.hashes) or self._is_waiting(turn, known):
            return
        if chosen(self._stage.records.known(turn.root), turn.hashes) not in (None, turn.record):
            return  # one was made meanwhile: the next request goes out under it
        tokens = message_tokens(turn, self._stage.lengths)
        job = Job(held, turn, known, terms, decision, tokens)
        task = asyncio.get_running_loop().create_task(self._run(job))
        self._running[turn.hashes[-1]] = task
        task.add_done_callback(lambda _: self._running.pop(turn.hashes[-1], None))

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await asyncio.gather(*self._running.values())

    @property
    def busy(self) -> bool:
        """Whether a compaction is under way."""
        return bool(self._running)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget_failures(self) -> None:
        """Let every conversation try again, however lately a try came to nothing."""
        self._waits = Recent(REMEMBERED_FAILURES)

    def _is_waiting(self, turn: Turn, known: Known) -> bool:
        """Whether a try that came to nothing says to wait until the conversation is longer."""
        last = next(self._waits.known(reversed(turn.hashes)), None)
        found = None if last is None else self._waits.get(last)
        return found is not None and found[1] == turn.record and known.tokens < found[0]

    async def _run(self, job: Job) -> None:
        try:
            record = await self._made(job)
            kept = None if record is None else await self._kept(job, record)
            if kept is not None:
                self.left_out(job.turn, kept, job.turn.record)
                return
        except (LedgerError, TimeoutError) as error:
            log.warning("a compaction cannot be kept: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
        except Exception as error:  # noqa: BLE001 - nobody waits for this; the conversation goes on as it is
            log.error("a compaction failed: %s", type(error).__name__)  # its text may quote a prompt
            self._services.telemetry.context_dropped.labels("defect").inc()
        state = failed(job.known.state, job.terms)
        self._waits.put(job.turn.hashes[-1], (state.exhausted_until, job.turn.record))
        self._stage.remember(job.turn, msgspec.structs.replace(job.known, state=state))

    async def _made(self, job: Job) -> Compaction | None:
        """The record of a compaction; None where it would leave too little out."""
        turn = job.turn
        if turn.context.summarizer == Summarizer.OFF:
            return await self._masked(job)
        facts = self._stage.views.messages(turn.tenant, turn.messages)
        cut = await asyncio.to_thread(
            plan_cut,
            turn.facts,
            job.tokens,
            tail_tokens=int(job.terms.harder * job.terms.shape.tail),
            room=job.decision.target,
            keep=keep_of(turn, job.tokens, facts),
            floor=turn.record.dropped[-1][1] if turn.record is not None and turn.record.dropped else 0,
        )
        old = turn.record or Compaction(b"", 0)
        dropped = joined([*old.dropped, *((each.start, each.stop) for each in cut.dropped)])
        new = Compaction(b"", 0, dropped).gone() - old.gone()
        saved = sum(job.tokens[at] for at in new)
        if saved <= turn.context.summary_tokens:
            return None
        limit = int(job.decision.target // _SPLIT_SHARE * turn.bytes_per_token())
        gone = new | old.gone()
        split = dict.fromkeys(cut.split, limit) | dict(old.split)
        work = self._work(job, dropped, new, sorted(split.keys() - gone))
        written = await self._summarize(self._services, work, turn.context.summarizer)
        if written is None:
            return None
        text = carrier(written.text)
        added = self._tokens(text, turn) - self._tokens(old.carrier, turn)
        return Compaction(
            anchor=turn.hashes[-1],
            covers=len(turn.hashes),
            dropped=dropped,
            masked=tuple(at for at in old.masked if at not in gone),
            split=tuple(sorted((at, size) for at, size in split.items() if at not in gone)),
            carrier=text,
            reason=job.decision.reason.value,
            by=written.by,
            tokens=max(job.known.tokens - saved + added, 1),
        )

    def _work(
        self, job: Job, dropped: Sequence[tuple[int, int]], new: set[int], shortened: Sequence[int]
    ) -> SummaryWork:
        turn, messages = job.turn, job.turn.messages
        first = next((at for at, each in enumerate(turn.facts) if each.role == "user"), None)
        laid = turn.laid.items("messages")
        source = sum(memoryview(turn.texts.get(at, laid[at])).nbytes for at in new)
        source += 0 if turn.record is None else len(turn.record.carrier)
        return SummaryWork(
            held=job.held,
            sent=turn.body,
            dropped=[messages[at] for start, stop in dropped for at in range(start, stop)],
            task=None if first is None else messages[first],
            budget=turn.context.summary_tokens,
            source_bytes=source,
            shortened=[messages[at] for at in shortened],
        )

    async def _masked(self, job: Job) -> Compaction | None:
        """A compaction without a summary."""
        turn, terms = job.turn, job.terms
        tail = int(terms.harder * terms.shape.tail)
        facts = self._stage.views.messages(turn.tenant, turn.messages)
        goal = Goal(job.decision.target, tail, None, job.decision.reason)
        return await masked(turn, self._stage.lengths, facts, goal)

    def _tokens(self, text: bytes, turn: Turn) -> int:
        return self._stage.lengths.of(turn.model.name).tokens(measure(text))

    async def _kept(self, job: Job, record: Compaction) -> Compaction | None:
        """The record as it was put into a slot; None where another one leaves out something else."""
        turn, records = job.turn, self._stage.records
        for _ in range(_TRIES):
            first = await self._stage.answered_by_store(turn.tenant, records.claim(turn.root, record))
            if first is None or first == record:
                return first
            other = chosen(records.known(turn.root), turn.hashes)
            if other is not None and other != turn.record:
                both = record.with_others(other)
                if both is None:
                    return None
                record = both
        return None

    def left_out(self, turn: Turn, record: Compaction, before: Compaction | None) -> None:
        """Count a compaction that was put into effect, and keep the originals of what it leaves out."""
        telemetry = self._services.telemetry
        telemetry.compactions.labels(record.reason, record.by).inc()
        new = newly_left_out(record, before)
        telemetry.compacted_messages.inc(len(new))
        if not new:
            return
        items = {turn.reference(turn.facts[at].lasting): bytes(turn.messages[at]) for at in new}
        self._services.spawn(self._stage.shown.keep(turn, items, record.reference))
