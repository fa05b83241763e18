"""Compactions in the background: between two requests of a conversation, where nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxgate.compression.compaction import Compaction, joined, newly_left_out
from ctxgate.compression.cut import CutReason, plan_cut, tail_start, units
from ctxgate.compression.recent import Recent
from ctxgate.compression.summary import carrier
from ctxgate.compression.window import failed, postponed
from ctxgate.gateway.context_level import Summarizer
from ctxgate.gateway.context_masking import (
    NO_TOKENS,
    Goal,
    Tokens,
    in_thread,
    keep_of,
    masked,
    message_tokens,
)
from ctxgate.gateway.context_records import weight
from ctxgate.gateway.context_recurring import Unused, places
from ctxgate.gateway.context_room import Room
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.summarizing import summarize
from ctxgate.gateway.summary_work import SummaryWork
from ctxgate.inference.lengths import measure
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ctxgate.compression.cut import Cut
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.window import Compact, Conversation, Terms
    from ctxgate.gateway.context import ContextStage
    from ctxgate.gateway.context_terms import Known
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.services import Services
    from ctxgate.gateway.summarizing import Summarized

log = logging.getLogger(__name__)
REMEMBERED_BYTES: Final = 32 * 2**20  # of what came to nothing
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
    tokens: Tokens = NO_TOKENS


class TooLittle(Record, frozen=True):
    """Too little lies behind the tail; more will once the conversation has grown by so many tokens."""

    growth: int


def _no_waits() -> Recent[bytes, tuple[int, Compaction | None]]:
    return Recent(REMEMBERED_BYTES, lambda wait: weight(wait[1]))


class Compactor:
    """Makes summaries, at most one at a time for each conversation. Belongs to one event loop."""

    def __init__(self, stage: ContextStage, services: Services, written_by: Summarize = summarize) -> None:
        self._stage = stage
        self._services = services
        self._summarize = written_by
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._waits = _no_waits()
        self._unused = Unused()
        self._room = Room()

    def begin(self, held: Held, turn: Turn, known: Known, terms: Terms, decision: Compact) -> None:
        """Compact a conversation that was answered, unless that is under way, or came to nothing just now."""
        if not self._running.keys().isdisjoint(turn.hashes) or self._is_waiting(turn, known):
            return
        if self._has_newer(turn):
            return
        if self._unused.holds_back(turn):
            self._services.telemetry.context_dropped.labels("unused").inc()
            return
        job = Job(held, turn, known, terms, decision)
        replica, size = (held.attempt.pool, held.attempt.replica), len(turn.identified.inbound.body.raw)
        if not self._room.take(replica, size):
            self._services.telemetry.context_dropped.labels("busy").inc()
            return
        task = asyncio.get_running_loop().create_task(self._in_turn(job, replica))
        names = [turn.hashes[length - 1] for length in places(turn)]
        self._running |= dict.fromkeys(names, task)

        def ended(_: asyncio.Task[None]) -> None:
            self._room.give_back(replica, size)
            for name in names:
                self._running.pop(name, None)

        task.add_done_callback(ended)

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await asyncio.gather(*set(self._running.values()))

    @property
    def busy(self) -> bool:
        """Whether a compaction is under way."""
        return bool(self._running)

    async def close(self) -> None:
        """End what is under way."""
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget_failures(self) -> None:
        """Let every conversation try again, however lately a try came to nothing."""
        self._waits = _no_waits()

    def _is_waiting(self, turn: Turn, known: Known) -> bool:
        """Whether a try that came to nothing says to wait until the conversation is longer."""
        last = next(self._waits.known(reversed(turn.hashes)), None)
        found = None if last is None else self._waits.get(last)
        return found is not None and found[1] == turn.record and known.tokens < found[0]

    def _has_newer(self, turn: Turn) -> bool:
        """Whether a compaction was made meanwhile: then the next request goes out under it."""
        return self._stage.records.known(turn.root, turn.hashes) not in (None, turn.record)

    async def _in_turn(self, job: Job, replica: tuple[str, str]) -> None:
        async with self._room.turn(replica):
            if not self._has_newer(job.turn):
                tokens = await message_tokens(job.turn, self._stage.lengths)
                await self._run(msgspec.structs.replace(job, tokens=tokens))

    async def _run(self, job: Job) -> None:
        try:
            made = await self._made(job)
            if isinstance(made, TooLittle):
                self._wait(job, postponed(job.known.state, job.terms, made.growth))
                return
            kept = None if made is None else await self._kept(job, made)
            if kept is not None:
                self._unused.made(job.turn, kept)
                self.left_out(job.turn, kept, job.turn.record)
                return
        except (LedgerError, TimeoutError) as error:
            log.warning("a compaction cannot be kept: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
        except Exception as error:  # noqa: BLE001 - nobody waits for this; the conversation goes on as it is
            log.error("a compaction failed: %s", type(error).__name__)  # its text may quote a prompt
            self._services.telemetry.context_dropped.labels("defect").inc()
        self._wait(job, failed(job.known.state, job.terms))

    def _wait(self, job: Job, state: Conversation) -> None:
        """Try again no sooner than this state says."""
        for length in places(job.turn):
            self._waits.put(job.turn.hashes[length - 1], (state.exhausted_until, job.turn.record))
        self._stage.remember(job.turn, msgspec.structs.replace(job.known, state=state))

    async def _made(self, job: Job) -> Compaction | TooLittle | None:
        """The record of a compaction; None where nobody wrote a summary."""
        turn = job.turn
        if turn.context.summarizer == Summarizer.OFF:
            return await self._masked(job) or await _too_little(job)
        facts = self._stage.views.messages(turn.tenant, turn.messages)
        cut = await asyncio.to_thread(_cut, job, facts)
        old = turn.record or Compaction(b"", 0)
        dropped = joined([*old.dropped, *((each.start, each.stop) for each in cut.dropped)])
        new = Compaction(b"", 0, dropped).gone() - old.gone()
        saved = sum(job.tokens.each[at] for at in new)
        if saved <= turn.context.summary_tokens:
            waiting = cut.reason is CutReason.OPEN_CALL  # the next request brings its result
            return TooLittle(1) if waiting else await _too_little(job, saved)
        limit = int(job.decision.target // _SPLIT_SHARE * turn.bytes_per_token(self._stage.lengths))
        gone = new | old.gone()
        split = dict.fromkeys(cut.split, limit) | dict(old.split)
        work = self._work(job, dropped, new, sorted(split.keys() - gone))
        written = await self._summarize(self._services, work, turn.context.summarizer)
        if written is None:
            return None
        text = carrier(written.text)
        added = self._tokens(text, turn) - self._tokens(old.carrier, turn)
        masked_still = tuple(at for at in old.masked if at not in gone)
        split_still = tuple(sorted((at, size) for at, size in split.items() if at not in gone))
        # What it says of later messages, a fork that lacks them is told as well: both share what is left out.
        covers = max(old.covers, *(at + 1 for at in (*gone, *masked_still, *split)))
        return Compaction(
            anchor=turn.hashes[covers - 1],
            covers=covers,
            dropped=dropped,
            masked=masked_still,
            split=split_still,
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
            claim = records.claim(turn.root, record, turn.hashes)
            first = await self._stage.answered_by_store(turn.tenant, claim)
            if first is None or first == record:
                return first
            other = records.known(turn.root, turn.hashes)
            if other is not None and other != turn.record:
                both = record.with_others(other)
                if both is None:
                    return None
                record = both
        return None

    def left_out(self, turn: Turn, record: Compaction, before: Compaction | None) -> None:
        """Count a compaction that was put into effect, and keep the originals of what it leaves out."""
        telemetry = self._services.telemetry
        new = newly_left_out(record, before)
        if self._stage.records.is_new(turn.root, record):  # equal requests at once make one compaction
            telemetry.compactions.labels(record.reason, record.by).inc()
            telemetry.compacted_messages.inc(len(new))
        if not new:
            return
        key = self._stage.records.key_of(turn.root, record)
        self._services.spawn(self._keep(turn, new, record.reference, [] if key is None else [key]))

    async def _keep(self, turn: Turn, new: Sequence[int], reference: str, forms: Sequence[bytes]) -> None:
        """Archive the originals of these messages."""

        def originals() -> dict[str, bytes]:
            return {turn.reference(turn.facts[at].lasting): bytes(turn.messages[at]) for at in new}

        await self._stage.shown.keep(turn, await in_thread(turn, originals), reference, forms)


def _cut(job: Job, facts: Sequence[Facts]) -> Cut:
    """What may be left out. `facts` are those of the client's messages, marks included."""
    turn, tokens = job.turn, job.tokens
    return plan_cut(
        turn.facts,
        tokens.each,
        tail_tokens=int(job.terms.harder * job.terms.shape.tail),
        room=job.decision.target,
        keep=keep_of(turn, tokens.each, facts),
        floor=turn.record.dropped[-1][1] if turn.record is not None and turn.record.dropped else 0,
        media=tokens.media,
    )


async def _too_little(job: Job, saved: int = 0) -> TooLittle:
    return TooLittle(await in_thread(job.turn, partial(until_more_is_old, job, saved)))


def until_more_is_old(job: Job, saved: int = 0) -> int:
    """The growth in tokens until more than a summary's worth lies behind the tail; `saved` tokens do now."""
    most, context = int(job.terms.harder * job.terms.shape.tail), job.turn.context
    tokens = job.tokens.each
    kept = sum(tokens[tail_start(units(job.turn.facts), tokens, most) :])
    return max(0, most - kept) + context.summary_tokens - saved + 1
