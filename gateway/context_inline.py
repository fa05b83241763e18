"""Masking in line: a prompt that is too long is made shorter before it goes out, or once it was refused.

A record is applied and checked first. It is kept for later requests where the prompt should now fit; where
only an engine can say, once one has taken the prompt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ctxgate.compression.compaction import covered
from ctxgate.compression.validity import Invalid
from ctxgate.compression.window import Reason
from ctxgate.compression.window import target as target_of
from ctxgate.gateway.context_long import locate
from ctxgate.gateway.context_masking import Goal, masked
from ctxgate.gateway.context_sizes import KNOWN_SPREAD, UNKNOWN_SPREAD, Estimate
from ctxgate.gateway.context_terms import asked_output
from ctxgate.gateway.ledger import LedgerError

if TYPE_CHECKING:
    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.window_errors import Refusal
    from ctxgate.gateway.context import ContextStage
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
_TRIES: Final = 4  # to agree with other processes that shorten the same conversation
_SHORTER: Final = (7, 10)  # of the target before, for a prompt that was refused again
_UNCOUNTED: Final = (3, 2)  # of the window: a prompt that was refused before its tokens were counted


class Inline:
    """Shortens prompts for a stage. Belongs to its event loop."""

    def __init__(self, stage: ContextStage, services: Services) -> None:
        self._stage = stage
        self._services = services

    async def mask(self, turn: Turn, reason: Reason) -> None:
        """Make the prompt fit without a model, where that can be done; the turn tells what came of it."""
        for left in reversed(range(_TRIES)):
            goal = self._goal(turn, reason)
            facts = self._stage.views.messages(turn.tenant, turn.messages)
            record, before = await masked(turn, self._stage.lengths, facts, goal), turn.record
            if record is None or not await self._applied(turn, record):
                return
            if not left or not self._surely_fits(turn, goal):
                turn.made, turn.pending, turn.replaced = True, turn.frozen, before
                return
            if await self._settled(turn, record, before):
                return

    def _goal(self, turn: Turn, reason: Reason) -> Goal:
        terms = self._stage.terms(turn, turn.known, background=False)
        wanted, most = target_of(terms), terms.limits.hard_trigger()
        if turn.refusal is not None:  # what was thought to fit did not
            most = wanted
            if turn.refusal.number > 1:
                most = wanted = wanted * _SHORTER[0] // _SHORTER[1]
        return Goal(wanted, terms.shape.tail, most, reason)

    def _surely_fits(self, turn: Turn, goal: Goal) -> bool:
        """Whether the prompt, and the answer asked for behind it, should be taken by any engine.

        Where they are not, the prompt is not what must change, and later requests ask for less.
        """
        length, window = turn.estimate.tokens, self._stage.windows.of(turn.pool, turn.model)
        if turn.refusal is not None or goal.limit is None or length > goal.limit:
            return False
        return window is None or length + (asked_output(turn.laid) or 0) <= window

    async def _applied(self, turn: Turn, record: Compaction) -> bool:
        """Let the prompt go out under a new record. False where it may not, or would be refused again."""
        before, was, said, arriving = turn.record, turn.estimate, turn.said, turn.arriving
        calibration, scale = self._stage.lengths.of(turn.model.name), turn.scale(self._stage.lengths)
        if not await self._put(turn, record):
            return False
        if turn.refusal is None:
            return True
        tokens = round(calibration.tokens(turn.said) * scale)  # by what the engine counted
        overflow = turn.refusal.overflow
        counted = overflow.prompt is not None and not overflow.at_least
        turn.estimate = Estimate(tokens, round((KNOWN_SPREAD if counted else UNKNOWN_SPREAD) * tokens))
        # An engine that names the answer asked for holds a place for all of it.
        if overflow.output is None or tokens - turn.estimate.spread <= overflow.window - overflow.output:
            return True
        turn.put(before, self._stage.views, self._stage.shaping)
        turn.estimate, turn.said, turn.arriving = was, said, arriving
        return False

    async def _put(self, turn: Turn, record: Compaction | None) -> bool:
        await locate(turn)
        try:
            turn.put(record, self._stage.views, self._stage.shaping)
        except Invalid:  # what went out before stays
            self._services.telemetry.context_dropped.labels("invalid").inc()
            return False
        await turn.measure(self._stage.lengths, self._stage.tokenizers)
        return True

    async def _settled(self, turn: Turn, record: Compaction, before: Compaction | None) -> bool:
        """Keep the record that was applied. False where another process was first and more must go."""
        first = await self._claimed(turn, record, before)
        if first == record:
            turn.made = True
            self._stage.compactor.left_out(turn, record, before)
            return True
        return await self._put(turn, first) and await self._stage.too_long(turn) is None

    async def _claimed(self, turn: Turn, record: Compaction, before: Compaction | None) -> Compaction | None:
        """The record that now counts for the request; the own one too where none can be kept."""

        def counts(other: Compaction) -> bool:
            return other != before and covered(other, turn.facts)

        if not turn.frozen:
            return record
        claim = self._stage.records.claim(turn.root, record, turn.hashes, counts)
        try:
            first = await self._stage.answered_by_store(turn.tenant, claim)
        except (LedgerError, TimeoutError) as error:
            log.warning("a compaction cannot be kept: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
            first = None
        if first is None:
            turn.frozen = False
            return record
        return first

    async def taken(self, turn: Turn) -> None:
        """An engine has taken the prompt: keep what this proves right."""
        refusal, pending = turn.refusal, turn.pending
        turn.refusal, turn.pending = None, False
        if refusal is not None:
            window = refusal.overflow.window
            self._stage.windows.learn(turn.pool, refusal.replica, turn.model, window)
        record, before = turn.record, turn.replaced
        if not pending or record is None:
            return
        if await self._claimed(turn, record, before) == record:
            self._stage.compactor.left_out(turn, record, before)


def believes(turn: Turn, refused: Refusal) -> bool:
    """Take over what an engine said of the prompt's length, for this request alone.

    False where its words are not about this request: then they say nothing of the window either.
    """
    overflow, size = refused.overflow, len(turn.body.raw)
    if not overflow.agrees(turn.estimate.tokens, asked_output(turn.laid), size):
        return False
    turn.refusal, length = refused, overflow.prompt
    if length is None or overflow.at_least:
        least = length or overflow.window * _UNCOUNTED[0] // _UNCOUNTED[1]
        length = max(turn.estimate.tokens, least)
    turn.estimate = Estimate(length, 0)
    return True
