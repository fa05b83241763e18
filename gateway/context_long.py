"""Work that takes time for each message of a request, done so that other requests go on in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from ctxgate.compression.compaction import covered

if TYPE_CHECKING:
    from ctxgate.compression.compaction import Compaction
    from ctxgate.gateway.context_turn import Turn

LONG_MESSAGES: Final = 1000
"""Of longer histories such work is done in a thread, or in pieces."""


async def is_covered(turn: Turn, record: Compaction) -> bool:
    """Whether a record can be applied. Of a known conversation only what is new is looked at."""
    known, facts = turn.known, turn.facts
    since = 0 if known is None or known.estimated or known.record != record else known.length
    if since or len(facts) <= LONG_MESSAGES:
        return covered(record, facts, since)
    return await asyncio.to_thread(covered, record, facts)


async def locate(turn: Turn) -> None:
    """Find where the messages of a long history lie in the body, in a step of its own."""
    if len(turn.facts) > LONG_MESSAGES:
        turn.laid.frame()
        await asyncio.sleep(0)
