"""What the tool `context_recall` is answered with: passages of what the conversation's own prompt lacks.

Only messages of this very conversation, of this tenant, that left its prompt or stand in it shortened can be
found. Whatever goes wrong, there is a result: that nothing was found.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from ctxgate.compression.identifiers import estimated_tokens
from ctxgate.compression.recall_gate import Gate, held_in
from ctxgate.compression.recall_snippet import HEADING
from ctxgate.compression.recall_tool import wanted
from ctxgate.compression.said import read_said
from ctxgate.compression.summary import without_markup
from ctxgate.compression.tool_output import split_oversize
from ctxgate.gateway.context_terms import asked_output
from ctxgate.gateway.ledger import LedgerError

if TYPE_CHECKING:
    from ctxgate.compression.recall_tool import Wanted
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
NOTHING: Final = "[Nothing was found. All that this conversation still has is shown in it.]"
UNREADABLE: Final = '[The arguments could not be read. Call it with {"query": "what to look for"}.]'
TOO_MANY: Final = "[No more searches in this answer. Go on with what is there.]"
WITHIN_S: Final = 1.0
"""What a search may take; the client waits for it as for the model."""

_LEAST: Final = 0.2  # relevance: the model asked, and judges what it is told
_LEAST_TOKENS: Final = 100
_BYTES_PER_TOKEN: Final = 3


class RecallAnswers:
    """Answers calls of one request's answer. `spent`: tokens that its results have taken so far."""

    def __init__(self, services: Services, turn: Turn) -> None:
        self._services = services
        self._turn = turn
        self.spent = 0

    async def answer(self, arguments: str, prompt: bytes) -> str:
        """The text of a result, which says nothing that the prompt holds already. Never raises."""
        asked = wanted(arguments)
        if asked is None:
            return self._told("unreadable", UNREADABLE)
        try:
            text = await self._found(asked, prompt)
        except (LedgerError, TimeoutError) as error:
            log.warning("nothing is looked up: %s", type(error).__name__)
            text = None
        except Exception as error:  # noqa: BLE001 - no defect in it may fail a request that works without it
            log.error("a look-up failed: %s", type(error).__name__)
            text = None
        if text is None:
            return self._told("nothing", NOTHING)
        self.spent += estimated_tokens(text)
        return self._told("found", text)

    def refuse(self) -> str:
        """The result of a call that comes after too many others."""
        return self._told("too many", TOO_MANY)

    def _told(self, outcome: str, text: str) -> str:
        self._services.telemetry.recall_tool.labels(outcome).inc()
        return text

    async def _found(self, asked: Wanted, prompt: bytes) -> str | None:
        turn, budget = self._turn, self._budget()
        ids = await self._services.context.shown.left_out(turn)
        if budget < _LEAST_TOKENS or not ids:
            return None
        if asked.id:
            if asked.id not in ids:
                return None
            if not asked.query:
                return await self._whole(asked.id, budget)
            ids = frozenset({asked.id})
        gate = Gate(held=held_in(prompt), least=_LEAST, among=ids)
        for _ in range(2):
            found = await self._services.recall.query(
                turn.tenant, turn.root, asked.query, asked.k, budget, WITHIN_S, gate
            )
            if found is not None:
                return found.text
            async with asyncio.timeout(WITHIN_S):  # after a restart it is being indexed
                await self._services.recall.settled()
        return await self._whole(asked.id, budget) if asked.id else None

    async def _whole(self, id_: str, budget: int) -> str | None:
        """A message by its id, or its two ends where it is too long."""
        async with asyncio.timeout(WITHIN_S):
            original = await self._services.archive.get(self._turn.tenant, id_)
        if original is None:
            return None
        said = read_said(original)
        text = without_markup(said.text.strip())
        room = budget * _BYTES_PER_TOKEN
        if len(text.encode("utf-8", "replace")) > room:
            text = split_oversize(text, room, id_)
        return f"{HEADING}\n[{said.role or 'message'} {id_}]\n{text}" if text else None

    def _budget(self) -> int:
        """What the next result may take, in tokens: what the team allows, and what the window has left."""
        turn = self._turn
        budget = turn.context.recall_tokens
        window = self._services.context.windows.of(turn.pool, turn.model)
        if window is not None:
            used = turn.estimate.tokens + (asked_output(turn.laid) or 0) + self.spent
            budget = min(budget, window - used)
        return budget
