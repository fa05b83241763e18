"""What the twin publishes is what a follower of an engine's stream hears."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ctxgate.inference.kv_events import Batch, Cleared, Removed, Stored
from ctxgate.inference.kv_publisher import EventAddresses, publishing
from ctxgate.inference.kv_subscriber import Endpoints, Subscriber, Waits
from support.twin import CHAT, chat, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Heard:
    """A follower that keeps batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.news = asyncio.Event()

    def begin(self, first: int) -> None:
        assert first == 0

    def apply(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.news.set()

    def lost(self, problem: str) -> None:
        raise AssertionError(problem)

    def quiet(self) -> None:
        pass

    async def until(self, count: int) -> list[Batch]:
        async with asyncio.timeout(20):
            while len(self.batches) < count:
                self.news.clear()
                await self.news.wait()
        return self.batches


@asynccontextmanager
async def following(addresses: EventAddresses, heard: Heard) -> AsyncIterator[None]:
    endpoints = Endpoints(addresses.events, addresses.replay)
    task = asyncio.create_task(Subscriber(endpoints, heard, Waits(replay_s=20, silence_s=0.05)).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_batches_are_heard_as_they_were_told_also_those_from_before(tmp_path: Path) -> None:
    addresses = EventAddresses(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    stored = Stored((2**64 - 1, 5), 7, 16, "GPU", "A", 0)
    heard = Heard()
    async with publishing(addresses) as publish, following(addresses, heard):
        assert publish is not None
        publish([stored, Removed((5,), "GPU", 0)])
        publish([Cleared()])
        await heard.until(2)
        async with asyncio.timeout(20):
            while len(heard.batches) < 3:  # what a subscription that was not yet known missed is told again
                publish([stored])
                await asyncio.sleep(0)
    told = [(stored, Removed((5,), "GPU")), (Cleared(),), (stored,)]
    assert heard.batches[:3] == [Batch(events, rank=0) for events in told]


async def test_a_twin_tells_of_each_request_what_it_stored(tmp_path: Path) -> None:
    addresses = EventAddresses(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    heard = Heard()
    body = chat(messages=[{"role": "user", "content": "one two three " * 40}], max_tokens=1)
    async with serving(kv_events=addresses) as client, following(addresses, heard):
        headers = {"x-session-id": "A"}
        async with client.session.post(client.url + CHAT, json=body, headers=headers) as answer:
            prompt = (await answer.json())["usage"]["prompt_tokens"]
        await heard.until(1)
    (event,) = heard.batches[0].events
    assert isinstance(event, Stored)
    assert (len(event.hashes), event.block, event.session) == (prompt // 16, 16, "A")


async def test_without_addresses_nothing_is_published() -> None:
    async with publishing(None) as publish:
        assert publish is None
