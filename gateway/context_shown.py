"""What goes out in another text than it came in, whatever is compacted.

That is results that were shortened when they arrived, and messages at whose end passages of dropped ones
were brought back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.arrivals import (
    ArrivalPolicy,
    ArrivalsMemory,
    arriving,
    settled,
    shorten,
)
from ctxgate.compression.recall_gate import Gate, held_in
from ctxgate.compression.recalled import RecalledMemory, decided, places, with_snippet
from ctxgate.compression.said import read_said
from ctxgate.gateway.context_terms import day_of
from ctxgate.gateway.ledger import LedgerError
from ctxgate.inference.rates import rates_at

if TYPE_CHECKING:
    from ctxgate.compression.arrivals import Arrived
    from ctxgate.compression.ask import Asking
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
BIG_BYTES: Final = 2**16
"""Results that arrive with more are shortened in a thread."""

RECALL_WITHIN_S: Final = 0.25
PASSAGES: Final = 5
_REQUESTS: Final = 20  # that are expected to carry what is brought back
_SHARE: Final = 10  # of a window, for all that is brought back between two compactions
_SHARE_OF_ONE: Final = 50  # and in one turn
_LEAST_TOKENS: Final = 100
_BYTES_PER_TOKEN: Final = 3
_AROUND: Final = 64  # bytes of JSON around a snippet


class Shown:
    """What one process remembers of such texts. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._arrivals = ArrivalsMemory(secrets.randbits(64))
        self._recalled = RecalledMemory(secrets.randbits(64))

    def forget(self) -> None:
        """Know nothing of the store any more, so that what is in use is asked for again."""
        self._arrivals.forget()
        self._recalled.forget()

    async def arrivals(self, turn: Turn) -> Asking[Arrived]:
        """The tool results of a request as they go out: a question to the store."""
        facts, messages = turn.facts, turn.messages
        policy = ArrivalPolicy(turn.context.tool_result_bytes, turn.context.sticky_tools)
        found = arriving(messages, facts, self._arrivals, turn.tenant)
        forms: dict[int, bytes] = {}
        if found.fresh:
            arguments = (messages, facts, policy, found, turn.reference)
            long = found.size > BIG_BYTES
            forms = await asyncio.to_thread(shorten, *arguments) if long else shorten(*arguments)
        laid = turn.laid.items("messages")
        return settled(messages, facts, found, forms, self._arrivals, turn.reference, laid)

    def arrived(self, turn: Turn, arrived: Arrived) -> None:
        """Let shortened results go out, and keep the originals of those that are new."""
        turn.shown |= arrived.texts
        if not arrived.originals:
            return
        telemetry = self._services.telemetry
        telemetry.arrival_bytes.labels("before").inc(arrived.bytes_before)
        telemetry.arrival_bytes.labels("saved").inc(arrived.bytes_saved)
        self._services.spawn(self.keep(turn, dict(arrived.originals)))

    def may_recall(self, turn: Turn) -> list[int]:
        """The messages at whose end something may have been brought back; none where nothing is left out."""
        if not turn.context.recall or turn.record is None or not turn.frozen:
            return []
        return places(turn.facts, turn.record.gone())

    async def found(self, turn: Turn, at: list[int], window: int | None) -> dict[int, bytes]:
        """What bears on the last message, by its index; the compaction has been applied."""
        last = len(turn.facts) - 1
        if last not in at or self._recalled.snippets.get(turn.hashes[last]) is not None:
            return {}
        budget = turn.context.recall_tokens
        if window is not None:
            known = (self._recalled.snippets.get(turn.hashes[each]) or b"" for each in at)
            left = window // _SHARE - sum(map(len, known)) // _BYTES_PER_TOKEN
            budget = min(budget, window // _SHARE_OF_ONE, left)
        if budget < _LEAST_TOKENS:
            return {}
        now_us = self._services.now_us()
        length = 0 if turn.known is None else turn.known.tokens
        rates = rates_at(turn.pool.rates, day_of(now_us), length)
        itself = frozenset({turn.reference(turn.facts[last].lasting)})
        gate = Gate(rates, _REQUESTS, length, held_in(turn.body.raw), without=itself)
        found = await self._services.recall.query(
            turn.tenant,
            turn.root,
            read_said(turn.messages[last]).text,
            PASSAGES,
            budget,
            RECALL_WITHIN_S,
            gate,
        )
        return {} if found is None else {last: found.text.encode("utf-8", "replace")}

    def recalled(self, turn: Turn, at: list[int], fresh: dict[int, bytes]) -> Asking[dict[int, bytes]]:
        """By message: what is put at its end, as it was first decided."""
        return decided(at, turn.hashes, self._recalled, fresh)

    def put(self, turn: Turn, snippets: dict[int, bytes]) -> None:
        """Let messages go out with what is put at their ends."""
        laid = turn.laid.items("messages")
        for at, snippet in snippets.items():
            text = with_snippet(turn.shown.get(at, laid[at]), snippet, self._recalled)
            if text is not None:
                turn.shown[at] = text
                turn.added += 2 * len(snippet) + _AROUND

    async def keep(self, turn: Turn, items: dict[str, bytes], together_as: str = "") -> None:
        """Archive originals, so that they can be had by their ids and searched.

        `together_as`: an id under which the list of theirs can be had.
        """
        task, now_us = turn.identified.task.name, self._services.now_us()
        archive = self._services.archive
        try:
            await archive.keep(turn.tenant, task, items, now_us, turn.root)
            if together_as:
                listed = msgspec.json.encode({"messages": list(items)})
                await archive.keep(turn.tenant, task, {together_as: listed}, now_us)
        except LedgerError as error:
            log.warning("originals are not archived: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
            return
        self._services.recall.add(turn.tenant, turn.root)
