"""One task per replica, for as long as it is configured."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ctxgate.gateway.fleet import Fleet, ReplicaRecord


async def for_each(fleet: Fleet, run: Callable[[ReplicaRecord], Coroutine[Any, Any, object]]) -> None:
    """Run something for every replica, for ever: begun with its replica, cancelled when that is gone.

    What `run` raises ends all of it, as nothing may go unwatched without a word.
    """
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    tasks: dict[int, asyncio.Task[object]] = {}

    def over(task: asyncio.Task[object]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
            failed.set_exception(error)

    try:
        while True:
            changed = fleet.changed
            records = {id(record): record for record in fleet.records()}
            for gone in tasks.keys() - records.keys():
                tasks.pop(gone).cancel()
            for new in records.keys() - tasks.keys():
                tasks[new] = loop.create_task(run(records[new]))
                tasks[new].add_done_callback(over)
            waiting = loop.create_task(changed.wait())
            try:
                await asyncio.wait((waiting, failed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()  # also where all of it is cancelled
            if failed.done():
                failed.result()
    finally:
        failed.cancel()
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
