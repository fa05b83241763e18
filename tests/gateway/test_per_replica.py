"""What runs for each replica leaves nothing behind when it is cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from ctxgate.gateway.per_replica import for_each

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import Fleet, ReplicaRecord


class _Fleet:
    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def records(self) -> list[str]:
        return ["one", "two"]


async def test_no_task_is_left_when_it_is_cancelled() -> None:
    begun: list[object] = []
    both = asyncio.Event()

    async def run(record: ReplicaRecord) -> None:
        begun.append(record)
        if len(begun) == len(_Fleet().records()):
            both.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    running = asyncio.create_task(for_each(cast("Fleet", _Fleet()), run))
    await both.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0)  # a cancelled task ends in the loop's next step
    assert asyncio.all_tasks() == before
