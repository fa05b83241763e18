"""A long history that is seen for the first time holds nobody up for long."""

from __future__ import annotations

import asyncio
import json

import msgspec

from ctxgate.compression.dialects import chat
from ctxgate.compression.dialects.chat import Views
from ctxgate.gateway.first_look import SLICE_BYTES, SLICE_MESSAGES, first_look


def history(count: int, size: int = 10) -> list[msgspec.Raw]:
    """So many different messages of about `size` bytes."""
    texts = (f"{number} " + "x" * size for number in range(count))
    return [msgspec.Raw(json.dumps({"role": "user", "content": text}).encode()) for text in texts]


async def slices(views: Views, messages: list[msgspec.Raw]) -> list[int]:
    """How many messages were read between two moments at which others could go on."""
    read: list[int] = []
    before = sum(views.knows("t", each) for each in messages)
    looking = asyncio.get_running_loop().create_task(first_look(views, "t", messages))
    while not looking.done():
        await asyncio.sleep(0)
        known = sum(views.knows("t", each) for each in messages)
        read += [known - before] if known > before else []
        before = known
    return read


async def test_context_f15_a_new_long_history_is_read_in_slices() -> None:
    views = Views()
    read = await slices(views, history(200))
    assert read == [SLICE_MESSAGES] * 3, "the other 8 are left to whoever asks"
    assert await slices(views, history(200)) == []


async def test_context_f15_long_messages_make_short_slices() -> None:
    messages = history(7, SLICE_BYTES // 2)
    assert await slices(Views(), messages) == [2, 2, 2]


async def test_context_f15_of_a_conversation_that_goes_on_only_one_message_is_looked_at() -> None:
    views = Views()
    views.messages("t", history(150))
    assert await slices(views, history(200)) == []


async def test_what_is_short_or_was_read_before_is_the_same_as_ever() -> None:
    views = Views()
    assert await slices(views, history(SLICE_MESSAGES)) == []
    messages = history(200)
    await first_look(views, "t", messages)
    assert views.messages("t", messages) == tuple(map(chat.facts_of, messages))
