"""The first sight of a long history: read in slices, so that other requests go on in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

    from ctxgate.compression.dialects.chat import Views

SLICE_MESSAGES: Final = 64
SLICE_BYTES: Final = 2**18
"""What is read at a time: a few milliseconds of work."""


async def first_look(views: Views, tenant: str, messages: Sequence[Raw]) -> None:
    """Let `views` know the messages of a request, of which it may know none.

    A conversation whose message in the middle is known is not new; then this looks at no other. Nor does it
    at one that is short.
    """
    if len(messages) <= SLICE_MESSAGES and sum(memoryview(each).nbytes for each in messages) <= SLICE_BYTES:
        return
    if views.knows(tenant, messages[len(messages) // 2]):
        return
    start = size = 0
    for at, message in enumerate(messages):
        size += memoryview(message).nbytes
        if size >= SLICE_BYTES or at + 1 - start >= SLICE_MESSAGES:
            views.messages(tenant, messages[start : at + 1])
            start, size = at + 1, 0
            await asyncio.sleep(0)
