"""What goes out in another text than it came in, whatever is compacted.

That is results that were shortened when they arrived, and messages at whose end passages of dropped ones
were brought back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.arrivals import (
    ArrivalPolicy,
    ArrivalsMemory,
    arriving,
    at_hand,
    settled,
    shorten,
)
from ctxgate.compression.arrivals import key_of as form_key
from ctxgate.compression.recall_gate import Gate, held_in
from ctxgate.compression.recalled import NOTHING, RecalledMemory, decided, key_of, places, with_snippet
from ctxgate.compression.recent import Recent
from ctxgate.compression.said import read_said
from ctxgate.gateway.context_masking import in_thread
from ctxgate.gateway.instants import day_of
from ctxgate.gateway.ledger import LedgerError
from ctxgate.inference.rates import rates_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.compression.arrivals import Arrived
    from ctxgate.compression.ask import Asking
    from ctxgate.compression.compaction import Compaction
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
BIG_BYTES: Final = 2**16
"""Results that arrive with more are shortened in a thread."""

REMEMBERED_IDS: Final = 200_000
"""Ids of what records leave out: some 20 MB."""

RECALL_WITHIN_S: Final = 0.25
PASSAGES: Final = 5
_REQUESTS: Final = 20  # that are expected to carry what is brought back
_SHARE: Final = 10  # of a window, for all that is brought back between two compactions
_SHARE_OF_ONE: Final = 50  # and in one turn, or
_FEW_TOKENS: Final = 300  # where that is less: a heading, and a passage as long as one can be
_LEAST_TOKENS: Final = 100
_BYTES_PER_TOKEN: Final = 3
_AROUND: Final = 64  # bytes of JSON around a snippet


class Shown:
    """What one process remembers of such texts. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._arrivals = ArrivalsMemory(secrets.randbits(64))
        self._recalled = RecalledMemory(secrets.randbits(64))
        self._ids: Recent[Compaction, frozenset[str]] = Recent(REMEMBERED_IDS, lambda ids: len(ids) + 1)

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
        asking = settled(messages, facts, found, forms, self._arrivals, turn.reference, laid)
        return self._held(turn, asking, {at: form_key(slot) for at, slot in found.unknown.items()})

    def _held(self, turn: Turn, asking: Asking[Arrived], keys: Mapping[int, bytes]) -> Asking[Arrived]:
        arrived = yield from asking
        self._hold(turn, [key for at, key in keys.items() if at in arrived.texts])
        return arrived

    def _hold(self, turn: Turn, forms: Sequence[bytes]) -> None:
        """Note, in the background, that these texts go with the request's task."""
        if forms:
            self._services.spawn(self.keep(turn, {}, forms=forms))

    def came_whole(self, turn: Turn) -> Asking[Arrived]:
        """Claim "as it came" for what nothing is known of: this request goes out without any change."""
        found = arriving(turn.messages, turn.facts, self._arrivals, turn.tenant)
        return settled(turn.messages, turn.facts, found, {}, self._arrivals, turn.reference)

    def without_store(self, turn: Turn, *, whole: bool = False) -> None:
        """Do without the store's answer: what is known stays shortened, what has just arrived goes out whole.

        `whole`: all of it does.
        """
        found = arriving(turn.messages, turn.facts, self._arrivals, turn.tenant)
        self._arrivals.sent_whole(found)
        if whole:
            return
        laid = turn.laid.items("messages")
        self.arrived(turn, at_hand(turn.messages, turn.facts, found, self._arrivals, turn.reference, laid))

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
        if not turn.context.recall or turn.record is None:
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
            budget = min(budget, max(window // _SHARE_OF_ONE, _FEW_TOKENS), left)
        if budget < _LEAST_TOKENS:
            return {}
        now_us = self._services.now_us()
        length = 0 if turn.known is None else turn.known.tokens
        rates = rates_at(turn.pool.rates, day_of(now_us), length)
        itself = frozenset({turn.reference(turn.facts[last].lasting)})
        held = held_in(turn.body.raw)
        gate = Gate(rates, _REQUESTS, length, held, without=itself, among=await self.left_out(turn))
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

    async def left_out(self, turn: Turn) -> frozenset[str]:
        """The ids of what this request's own messages lack: runs that begin alike share a root, and no more.

        Those of a record are remembered: its anchor is the hash of all messages that it speaks of.
        """
        shown = frozenset(turn.reference(turn.facts[each].lasting) for each in turn.shown)
        record = turn.record
        if record is None:
            return shown
        ids = self._ids.get(record)
        if ids is None:
            ids = await in_thread(turn, partial(_ids, turn, record))
            self._ids.put(record, ids)
        return shown | ids

    def recalled(self, turn: Turn, at: list[int], fresh: dict[int, bytes]) -> Asking[dict[int, bytes]]:
        """By message: what is put at its end, as it was first decided."""
        snippets = self._recalled.snippets
        new = [each for each in at if snippets.get(turn.hashes[each]) is None]
        found = yield from decided(at, turn.hashes, self._recalled, fresh)
        self._hold(turn, [key_of(turn.hashes[each]) for each in new if each in found])
        return found

    async def brought_back(self, turn: Turn, at: list[int], window: int | None) -> dict[int, bytes]:
        """What is put at the ends of messages; of a store that gives no answer what memory has of it."""
        if not turn.frozen:
            return self.remembered(turn, at)
        fresh = await self.found(turn, at, window)
        try:
            asking = self.recalled(turn, at, fresh)
            return await self._services.context.answered_by_store(turn.tenant, asking)
        except (LedgerError, TimeoutError) as error:
            log.warning("what is brought back cannot be kept: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
            return self.remembered(turn, at)

    def remembered(self, turn: Turn, at: list[int]) -> dict[int, bytes]:
        """As `recalled`, without the store: what it may still say later must not change this."""
        snippets = self._recalled.snippets
        found = {each: snippets.get(turn.hashes[each]) for each in at}
        for each, snippet in found.items():
            if snippet is None:
                snippets.put(turn.hashes[each], NOTHING)
        return {each: snippet for each, snippet in found.items() if snippet}

    def put(self, turn: Turn, snippets: dict[int, bytes]) -> None:
        """Let messages go out with what is put at their ends."""
        laid = turn.laid.items("messages")
        for at, snippet in snippets.items():
            text = with_snippet(turn.shown.get(at, laid[at]), snippet, self._recalled)
            if text is not None:
                turn.shown[at] = text
                turn.added += 2 * len(snippet) + _AROUND

    async def keep(
        self, turn: Turn, items: dict[str, bytes], together_as: str = "", forms: Sequence[bytes] = ()
    ) -> None:
        """Archive originals, so that they can be had by their ids and searched.

        `together_as`: an id under which the list of theirs can be had. `forms`: keys of what the store of
        forms holds of the task. Where the task was deleted since the request came, all that is gone.
        """
        task, now_us = turn.identified.task.name, self._services.now_us()
        keep = partial(self._services.archive.keep, since_us=turn.identified.inbound.received_at_us)
        try:
            if not await keep(turn.tenant, task, items, now_us, turn.root, forms=forms):
                self._services.context.wiped(turn.tenant, forms)
                return
            if together_as:
                listed = msgspec.json.encode({"messages": list(items)})
                await keep(turn.tenant, task, {together_as: listed}, now_us)
        except LedgerError as error:
            log.warning("originals are not archived: %s", type(error).__name__)
            self._services.telemetry.context_dropped.labels("store").inc()
            return
        if items:
            self._services.recall.add(turn.tenant, turn.root)


def _ids(turn: Turn, record: Compaction) -> frozenset[str]:
    """The ids of what a record leaves out or shortens."""
    at = record.gone() | {*record.masked} | {each for each, _ in record.split}
    return frozenset(turn.reference(turn.facts[each].lasting) for each in at)
