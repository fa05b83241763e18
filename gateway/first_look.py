"""The first sight of a long history: read in slices, so that other requests go on in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msgspec import Raw

    from ctxgate.compression.ask import Text
    from ctxgate.compression.chain import Chains
    from ctxgate.compression.dialects.chat import Facts, Views
    from ctxgate.gateway.context_sizes import Lengths

SLICE_MESSAGES: Final = 64
SLICE_BYTES: Final = 2**18
"""What is read at a time: a few milliseconds of work."""


async def first_look(views: Views, tenant: str, messages: Sequence[Raw]) -> None:
    """Let `views` know the messages of a request, of which it may know none.

    A conversation whose message in the middle is known is not new; then this looks at no other. Nor does it
    at one that is short.
    """
    if is_short(messages) or views.knows(tenant, messages[len(messages) // 2]):
        return
    for start, stop in _slices(messages):
        views.messages(tenant, messages[start:stop])
        await asyncio.sleep(0)


async def first_chain(chains: Chains, tenant: str, facts: Sequence[Facts]) -> None:
    """Let `chains` know the chain hashes of a request, in the same way."""
    for _ in chains.in_pieces(tenant, facts):
        await asyncio.sleep(0)


async def first_sizes(lengths: Lengths, facts: Sequence[Facts], messages: Sequence[Text]) -> None:
    """Let `lengths` know the sizes of a request's messages, in the same way."""
    if is_short(messages) or lengths.knows(facts[len(facts) // 2]):
        return
    for start, stop in _slices(messages):
        lengths.sizes(facts[start:stop], messages[start:stop])
        await asyncio.sleep(0)


def is_short(messages: Sequence[Text]) -> bool:
    """Whether all messages of a request are no more than what is read at a time."""
    return (
        len(messages) <= SLICE_MESSAGES and sum(memoryview(each).nbytes for each in messages) <= SLICE_BYTES
    )


def _slices(messages: Sequence[Text]) -> Iterator[tuple[int, int]]:
    """The messages in slices; what is left at the end, less than one, is left to whoever asks."""
    start = size = 0
    for at, message in enumerate(messages):
        size += memoryview(message).nbytes
        if size >= SLICE_BYTES or at + 1 - start >= SLICE_MESSAGES:
            yield start, at + 1
            start, size = at + 1, 0
