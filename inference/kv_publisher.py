"""Publishes cache events as a vLLM engine does: numbered batches for whoever listens, told again on request.

Needs pyzmq, which is imported when something is published.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.inference.kv_events import END, Cleared, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ctxgate.inference.kv_events import Event

BUFFERED: Final = 10_000  # batches that can be told again
_PACK: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class EventAddresses:
    """Where to listen, as ZeroMQ addresses: for subscribers, and for requests to tell batches again."""

    events: str
    replay: str | None = None


@asynccontextmanager
async def publishing(
    addresses: EventAddresses | None,
) -> AsyncIterator[Callable[[Sequence[Event]], None] | None]:
    """What publishes the events of one step; None where there are no addresses.

    Raises ImportError without pyzmq, zmq.ZMQError for an address that cannot be listened on.
    """
    if addresses is None:
        yield None
        return
    publisher = _Publisher(addresses)
    replays = asyncio.create_task(publisher.replay())
    try:
        yield publisher.publish
    finally:
        replays.cancel()
        with suppress(asyncio.CancelledError):
            await replays
        publisher.close()


class _Publisher:
    def __init__(self, addresses: EventAddresses) -> None:
        import zmq  # noqa: PLC0415 - an extra
        import zmq.asyncio  # noqa: PLC0415 - as above

        self._context: Any = zmq.asyncio.Context()
        self._plain: Any = zmq.Context(self._context)  # the same one: what is published waits for nobody
        self._live = self._plain.socket(zmq.PUB)
        self._live.bind(addresses.events)
        self._asked: Any = None
        if addresses.replay is not None:
            self._asked = self._context.socket(zmq.ROUTER)
            self._asked.bind(addresses.replay)
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; nobody is waited for."""
        number = self._sequence.to_bytes(8, "big")
        batch = _PACK.encode([time.time(), [_shape(event) for event in events], 0])
        self._live.send_multipart((b"", number, batch))
        self._buffer.append((number, batch))
        self._sequence += 1

    async def replay(self) -> None:
        """Answer requests, for ever."""
        while self._asked is not None:
            client, *request = await self._asked.recv_multipart()
            if len(request) != 2:
                continue  # as the engine does
            for number, batch in tuple(self._buffer):
                if number >= request[1]:
                    await self._asked.send_multipart((client, b"", b"", number, batch))
            await self._asked.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        """Free the addresses."""
        self._live.close(linger=0)
        if self._asked is not None:
            self._asked.close(linger=0)
        self._context.term()


def _shape(event: Event) -> dict[str, Any]:
    match event:
        case Stored():
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": [],
                "block_size": event.block,
                "lora_id": None,
                "medium": event.tier,
                "lora_name": None,
                "group_idx": event.group,
                "session_id": event.session,
            }
        case Removed():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.hashes,
                "medium": event.tier,
                "group_idx": event.group,
            }
        case Cleared():
            return {"type": "AllBlocksCleared"}
