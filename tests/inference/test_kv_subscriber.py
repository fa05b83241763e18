"""The follower of an event stream against a publisher of the test's own: gaps, replays, restarts, silence."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ctxgate.inference.kv_events import END, SLICE, Cleared, Message, Stored
from ctxgate.inference.kv_order import Order, Verdict
from ctxgate.inference.kv_subscriber import Endpoints, Subscriber, Waits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from ctxgate.inference.kv_events import Batch

pytestmark = pytest.mark.integration

PATIENT = Waits(replay_s=30.0, silence_s=30.0)
HASTY = Waits(replay_s=0.05, silence_s=30.0)


def payload(number: int, engine: str = "one") -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "session_id": engine,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


class Told:
    """What a follower was told, in order: numbers of blocks, `begin N`, and problems."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self._news = asyncio.Event()

    def _add(self, what: object) -> None:
        self.log.append(what)
        self._news.set()

    def begin(self, first: int) -> None:
        self._add(f"begin {first}")

    def apply(self, batch: Batch) -> None:
        (event,) = batch.events
        assert isinstance(event, Stored)
        self._add(event.hashes[0] if event.session == "one" else f"{event.session} {event.hashes[0]}")

    def lost(self, problem: str) -> None:
        self._add("lost")

    def quiet(self) -> None:
        self._add("quiet")

    async def until(self, last: object) -> list[object]:
        """The log, once it ends with this."""
        async with asyncio.timeout(20):
            while not self.log or self.log[-1] != last:
                self._news.clear()
                await self._news.wait()
        return self.log

    async def of(self, what: object) -> None:
        """Wait until this was told, whatever came after it."""
        async with asyncio.timeout(20):
            while what not in self.log:
                self._news.clear()
                await self._news.wait()


class Engine:
    """The publishing side, with a replay endpoint that answers from what it is given."""

    def __init__(self, replays: Sequence[bytes] | None) -> None:
        self.context: Any = zmq.asyncio.Context()
        self.live = self.context.socket(zmq.XPUB)  # which hears of its subscribers
        self.router = self.context.socket(zmq.ROUTER)
        self.port = self.live.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.buffer = replays  # None: it never answers
        self.first = 0  # the number of the buffer's first batch
        self.asked: list[list[bytes]] = []
        self.subscribed = asyncio.Event()

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(f"tcp://127.0.0.1:{self.port}", f"tcp://127.0.0.1:{self.replay_port}")

    async def serve(self) -> None:
        """Answer replays, for ever."""
        while True:
            client, *request = await self.router.recv_multipart()
            self.asked.append(request)
            if self.buffer is None:
                continue
            start = int.from_bytes(request[1], "big")
            for number, batch in enumerate(self.buffer, self.first):
                if number >= start:
                    await self.router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), batch))
            await self.router.send_multipart((client, b"", b"", END, b""))

    async def hear(self) -> None:
        """Wait for a subscriber."""
        await self.live.recv()

    def at_once(self) -> zmq.Socket[bytes]:
        """The live socket as one that sends without a turn of the event loop."""
        return zmq.Socket.shadow(self.live.underlying)

    async def publish(self, numbers: Iterable[int], engine: str = "one") -> None:
        for number in numbers:
            await self.live.send_multipart((b"", number.to_bytes(8, "big"), payload(number, engine)))


@asynccontextmanager
async def followed(
    replays: Sequence[bytes] | None, waits: Waits = PATIENT, *, first: int = 0, replay: bool = True
) -> AsyncIterator[tuple[Engine, Told]]:
    engine, told = Engine(replays), Told()
    engine.first = first
    endpoints = engine.endpoints if replay else Endpoints(engine.endpoints.events)
    tasks = [
        asyncio.create_task(Subscriber(endpoints, told, waits).run()),
        asyncio.create_task(engine.serve()),
    ]
    try:
        await engine.hear()
        yield engine, told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.context.destroy(linger=0)


async def test_what_came_before_is_asked_for_at_the_start_and_nothing_is_read_twice() -> None:
    async with followed([payload(number) for number in range(3)]) as (engine, told):
        await told.until(2)
        await engine.publish([2, 3])
        assert await told.until(3) == ["begin 0", 0, 1, 2, 3]
        assert engine.asked == [[b"", b"\0" * 8]]


async def test_routing_c2_a_gap_is_filled_by_a_replay() -> None:
    async with followed([]) as (engine, told):
        await engine.publish([0, 1, 2])
        await told.until(2)
        engine.buffer = [payload(number) for number in range(6)]
        await engine.publish([5])
        assert await told.until(5) == ["begin 0", 0, 1, 2, 3, 4, 5]
        assert engine.asked[1] == [
            b"",
            (2).to_bytes(8, "big"),
        ]  # the last one again, to know the engine by it


async def test_routing_c2_a_gap_that_cannot_be_filled_makes_what_is_known_void() -> None:
    async with followed([]) as (engine, told):
        await engine.publish([0, 1, 2])
        await told.until(2)
        engine.buffer, engine.first = [payload(5)], 5
        await engine.publish([5])
        assert await told.until(5) == ["begin 0", 0, 1, 2, "lost", "begin 5", 5]


async def test_without_a_replay_endpoint_a_gap_makes_what_is_known_void() -> None:
    async with followed([], replay=False) as (engine, told):
        await engine.publish([0, 1, 4])
        assert await told.until(4) == ["begin 0", 0, 1, "lost", "begin 4", 4]


async def test_a_stream_whose_start_is_gone_begins_where_its_buffer_does() -> None:
    async with followed([payload(7), payload(8)], first=7) as (engine, told):
        await engine.publish([9])
        assert await told.until(9) == ["begin 0", "begin 7", 7, 8, 9]


async def test_routing_c4_a_replay_that_is_not_answered_ends_in_time() -> None:
    async with followed(None, HASTY) as (engine, told):
        await told.until("lost")
        await engine.publish([4])
        assert await told.until(4) == ["begin 0", "lost", "lost", "begin 4", 4]


async def test_routing_c5_a_late_replay_is_not_read() -> None:
    async with followed(None, HASTY) as (engine, told):
        await told.until("lost")
        await engine.publish([4])
        await told.until(4)
        assert [int.from_bytes(request[1], "big") for request in engine.asked] == [0, 0]
        engine.buffer = [payload(number) for number in range(5)]  # it answers only now
        await engine.publish([5])
        assert await told.until(5) == ["begin 0", "lost", "lost", "begin 4", 4, 5]


async def test_an_engine_that_starts_again_is_begun_anew() -> None:
    async with followed([payload(0), payload(1)]) as (engine, told):
        await told.until(1)
        engine.buffer = [payload(0, "two")]
        await engine.publish([0], "two")
        await told.until("two 0")
        engine.buffer = [payload(0, "two"), payload(1, "two")]
        await engine.publish([1], "two")
        assert await told.until("two 1") == ["begin 0", 0, 1, "begin 0", "two 0", "two 1"]


async def test_an_engine_that_went_further_than_the_one_before_is_known_by_its_content() -> None:
    async with followed([payload(0), payload(1)]) as (engine, told):
        await told.until(1)
        engine.buffer = [payload(number, "two") for number in range(4)]
        await engine.publish([4], "two")
        log = await told.until("two 4")
        assert log == ["begin 0", 0, 1, "begin 0", *(f"two {number}" for number in range(5))]


async def test_routing_c1_a_batch_that_cannot_be_read_makes_what_is_known_void() -> None:
    async with followed([]) as (engine, told):
        await engine.publish([0])
        await told.until(0)
        await engine.live.send_multipart((b"", (1).to_bytes(8, "big"), b"\xc1"))
        await engine.live.send_multipart((b"", b"no number"))
        await engine.publish([2])
        assert await told.until(2) == ["begin 0", 0, "lost", "begin 2", "lost", "begin 2", 2]


class Slices(Told):
    """Notes the blocks of each slice, and each turn that others had on the loop after it."""

    def apply(self, batch: Batch) -> None:
        blocks = sum(len(event.hashes) for event in batch.events if not isinstance(event, Cleared))
        self._add(blocks)
        if blocks > 1:
            asyncio.get_running_loop().call_soon(self._add, "others")


async def test_a_large_batch_is_read_in_slices_between_which_others_run_and_the_next_one_waits() -> None:
    engine, told = Engine([]), Slices()
    task = asyncio.create_task(Subscriber(Endpoints(engine.endpoints.events), told, PATIENT).run())
    try:
        await engine.hear()
        stored = {"type": "BlockStored", "block_hashes": [*range(2 * SLICE + 100)], "token_ids": []}
        for number, event in enumerate(
            [stored | {"block_size": 16}, {"type": "BlockRemoved", "block_hashes": [1]}]
        ):
            batch = msgspec.msgpack.encode([0.0, [event], 0])
            await engine.live.send_multipart((b"", number.to_bytes(8, "big"), batch))
        log = [entry for entry in await told.until(1) if entry != "begin 0"]
        assert log[:4] == [SLICE, "others", SLICE, "others"]
        assert [entry for entry in log if entry != "others"] == [SLICE, SLICE, 100, 1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.context.destroy(linger=0)


async def test_a_batch_whose_end_cannot_be_read_makes_its_beginning_void_too() -> None:
    engine, told = Engine([]), Slices()
    task = asyncio.create_task(Subscriber(Endpoints(engine.endpoints.events), told, PATIENT).run())
    try:
        await engine.hear()
        removed = {"type": "BlockRemoved", "block_hashes": [*range(SLICE)]}
        broken = msgspec.msgpack.encode([0.0, [removed, {"type": "BlockRemoved"}], 0])
        good = msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [1]}], 0])
        for number, batch in enumerate([broken, good]):
            await engine.live.send_multipart((b"", number.to_bytes(8, "big"), batch))
        log = [entry for entry in await told.until(1) if entry != "others"]
        assert log in (["begin 0", "lost", "begin 1", 1], ["begin 0", SLICE, "lost", "begin 1", 1])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.context.destroy(linger=0)


def hear_at_once(engine: Engine, subscriber: Subscriber, told: Told, numbers: Iterable[int]) -> None:
    """Publish, and have the subscriber catch up until the last one was told: the event loop gets no turn."""
    live, wanted = engine.at_once(), [*numbers]
    for number in wanted:
        live.send_multipart((b"", number.to_bytes(8, "big"), payload(number)))
    deadline = time.monotonic() + 20
    while told.log[-1] != wanted[-1]:
        assert time.monotonic() < deadline, told.log
        subscriber.catch_up()


async def test_what_has_come_is_read_without_a_turn_of_the_event_loop_and_a_gap_is_filled_later() -> None:
    engine, told = Engine([payload(number) for number in range(9)]), Told()
    subscriber = Subscriber(engine.endpoints, told, PATIENT)
    subscriber.catch_up()  # before it runs there is nothing to read
    tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(engine.serve())]
    try:
        await engine.hear()
        await told.until(8)
        await engine.publish([9])
        await told.until(9)
        for _ in range(20):  # turns, so that it waits for the next message
            await asyncio.sleep(0)
        hear_at_once(engine, subscriber, told, [10, 11, 12])
        assert told.log == ["begin 0", *range(13)]
        engine.first, engine.buffer = 10, [payload(number) for number in range(10, 18)]
        await engine.publish([17])
        live = engine.at_once()
        live.send_multipart((b"", (18).to_bytes(8, "big"), payload(18)))
        subscriber.catch_up()  # it may hold number 17 now: what is missing before it takes a replay
        subscriber.catch_up()
        assert (await told.until(18)) == ["begin 0", *range(19)]
    finally:
        await ended(tasks, engine)


async def ended(tasks: Sequence[asyncio.Task[None]], engine: Engine) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    engine.context.destroy(linger=0)


async def test_a_message_that_comes_as_the_wait_for_it_ends_is_read() -> None:
    engine, told = Engine([]), Told()
    subscriber = Subscriber(engine.endpoints, told, Waits(replay_s=30.0, silence_s=0.001))
    tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(engine.serve())]
    live = engine.at_once()
    try:
        await engine.hear()
        await told.until("quiet")
        for number in range(30):
            live.send_multipart((b"", number.to_bytes(8, "big"), payload(number)))
            # The loop is held up: when it goes on, the message and the end of the wait are both there.
            time.sleep(0.004)  # noqa: ASYNC251 - as said
            await told.of(number)
        assert [each for each in told.log if each != "quiet"] == ["begin 0", *range(30)]
        assert len(engine.asked) == 1  # nothing had to be told again
    finally:
        await ended(tasks, engine)


async def test_routing_c13_silence_is_reported() -> None:
    async with followed([], Waits(replay_s=30.0, silence_s=0.01)) as (_, told):
        assert await told.until("quiet") == ["begin 0", "quiet"]


def test_routing_c5_order_reads_each_number_once() -> None:
    order = Order()
    for number in range(8):
        assert order.judge(Message(number, payload(number))) is Verdict.NEXT
        order.read(Message(number, payload(number)))
    assert order.judge(Message(7, payload(7))) is Verdict.OLD
    assert order.judge(Message(3, payload(3))) is Verdict.OLD
    assert order.judge(Message(9, payload(9))) is Verdict.GAP
    assert order.judge(Message(3, payload(3, "two"))) is Verdict.RESTARTED
    assert order.resume == 7
    order.begin(20)
    assert order.judge(Message(20, payload(20))) is Verdict.NEXT
    assert order.resume == 20
