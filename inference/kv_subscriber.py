"""Follows the event stream of one engine over ZeroMQ: in order, without gaps, or saying that there was one.

What a stream cannot tell again is asked for at the engine's replay endpoint: at the start everything that
it still holds, and after a gap what is missing. Where that fails, what was known is void: the follower is
told so, and what comes next stands on its own. Messages wait in the socket's bounded queue while a replay is
read; one that overflows is a gap like any other.

Needs pyzmq, which is imported when a subscriber runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ctxgate.inference import kv_events
from ctxgate.inference.kv_events import Undecodable
from ctxgate.inference.kv_order import Order, Verdict

if TYPE_CHECKING:
    from ctxgate.inference.kv_events import Batch, Message

QUEUED: Final = 20_000  # messages that wait in the socket at most
AT_ONCE: Final = 8  # messages that are read before others get their turn on the event loop
CAUGHT_UP: Final = 64  # messages that are read at once when somebody needs to know now
SMALL: Final = 32_768  # bytes of a message that may be
MOST_REPLAYED: Final = 50_000  # messages of one replay
MAX_MESSAGE: Final = 64 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where an engine's events are heard: ZeroMQ addresses of its PUB socket and, if any, of its replays."""

    events: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds: how long the next message of a replay may take, and how often silence is reported."""

    replay_s: float = 5.0
    silence_s: float = 1.0


class Follower(Protocol):
    """Who is told. Called on the event loop, one call at a time."""

    def begin(self, first: int) -> None:
        """What was known is void; the messages from this number on follow, 0 being the engine's first."""

    def apply(self, batch: Batch) -> None:
        """The events of one step, in order; of a large one a slice. Others run between slices."""

    def lost(self, problem: str) -> None:
        """Something was not understood or could not be fetched; `begin` follows where it matters."""

    def quiet(self) -> None:
        """Nothing came for a while."""


class Subscriber:
    """One engine's stream, until it is cancelled."""

    def __init__(self, endpoints: Endpoints, follower: Follower, waits: Waits = Waits()) -> None:
        self._endpoints = endpoints
        self._follower = follower
        self._waits = waits
        self._order = Order()
        self._context: Any = None
        self._live: Any = None
        self._now: Any = None  # the same socket as one that does not wait
        self._idle = False  # nothing is being read
        self._held: list[bytes] | None = None  # a message taken from the socket that has yet to be read

    async def run(self) -> None:
        """Follow the stream for ever. Raises ImportError without pyzmq, zmq.ZMQError for a bad address."""
        import zmq  # noqa: PLC0415 - an extra
        import zmq.asyncio  # noqa: PLC0415 - as above

        self._context = zmq.asyncio.Context()
        try:
            with self._context.socket(zmq.SUB) as live:
                live.setsockopt(zmq.LINGER, 0)
                live.setsockopt(zmq.RCVHWM, QUEUED)
                live.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
                live.setsockopt(zmq.SUBSCRIBE, self._endpoints.topic.encode())
                live.connect(self._endpoints.events)
                self._live, self._now = live, zmq.Socket.shadow(live.underlying)
                await self._begin(None)
                while True:
                    await self._hear()
        finally:
            self._idle = False
            self._context.destroy(linger=0)

    def catch_up(self) -> None:
        """Read what has come by now, if it is a few small messages in order; never waits.

        For one who decides by what is known: a busy event loop may have left messages in the socket.
        """
        import zmq  # noqa: PLC0415 - as in `run`

        if not self._idle or self._held is not None or not self._now.get(zmq.EVENTS) & zmq.POLLIN:
            return
        for _ in range(CAUGHT_UP):
            frames = self._come()
            if frames is None:
                break
            if sum(map(len, frames)) > SMALL or not self._read_at_once(frames):
                self._held = frames
                break
        self._live.get(zmq.EVENTS)  # the event loop looks again at what is left: its signal is gone

    def _read_at_once(self, frames: list[bytes]) -> bool:
        """Read a message that is next in order; False, and nothing done, where it is not."""
        try:
            message = kv_events.message(frames)
            if message.batch is None:
                return True
            if self._order.judge(message) is not Verdict.NEXT:
                return False
            parts = [*kv_events.slices(message.batch)]
        except Undecodable:
            return False
        self._order.read(message)
        for part in parts:
            self._follower.apply(part)
        return True

    def _come(self) -> list[bytes] | None:
        """The next message, if one has come."""
        import zmq  # noqa: PLC0415 - as in `run`

        frames, self._held = self._held, None
        if frames is None:
            try:
                frames = self._now.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
        return frames

    async def _hear(self) -> None:
        """Read what has come, a bounded part of it at a time.

        It waits for a message without taking it: one that comes as the wait ends would be lost.
        """
        if self._held is None:
            self._idle = True
            there = await self._live.poll(1000 * self._waits.silence_s)
            self._idle = False
            if not there and self._held is None:
                self._follower.quiet()
                return
        for _ in range(AT_ONCE):
            frames = self._come()
            if frames is None:
                break
            await self._take(frames)
        await asyncio.sleep(0)

    async def _take(self, frames: list[bytes]) -> None:
        try:
            message = kv_events.message(frames)
        except Undecodable as error:
            self._follower.lost(str(error))
            self._restart(self._order.next)
            return
        if message.batch is None:
            return
        match self._order.judge(message):
            case Verdict.NEXT:
                await self._read(message)
            case Verdict.GAP:
                await self._fill(message)
            case Verdict.RESTARTED:
                await self._begin(message)
            case Verdict.OLD:
                pass

    async def _read(self, message: Message) -> None:
        """Tell of a message that is next; one that cannot be read has told of nobody knows what."""
        self._order.read(message)
        try:
            for part in kv_events.slices(message.batch or b""):
                self._follower.apply(part)
                if not part.last:
                    await asyncio.sleep(0)
        except Undecodable as error:
            self._follower.lost(str(error))
            self._restart(self._order.next)

    def _restart(self, first: int) -> None:
        self._order.begin(first)
        self._follower.begin(first)

    async def _begin(self, message: Message | None) -> None:
        """A new engine, or the first one: all that it still can tell, and then this message."""
        self._restart(0)
        await self._replayed(0)
        if message is None:
            return
        if message.sequence != self._order.next:
            if message.sequence < self._order.next:
                return  # the replay told of it
            self._restart(message.sequence)
        await self._read(message)

    async def _fill(self, message: Message) -> None:
        """Fetch what is missing before a message; where that fails begin with it."""
        await self._replayed(self._order.resume)
        verdict = self._order.judge(message)
        if verdict is Verdict.OLD:
            return
        if verdict is not Verdict.NEXT:
            if self._order.next:
                self._follower.lost(f"messages {self._order.next} to {message.sequence - 1} are lost")
            self._restart(message.sequence)
        await self._read(message)

    async def _replayed(self, start: int) -> None:
        """Read a replay from a number on, as far as it comes."""
        if self._endpoints.replay is None:
            return
        try:
            if not await self._read_replay(self._endpoints.replay, start):
                self._restart(0)
                await self._read_replay(self._endpoints.replay, 0)
        except (TimeoutError, Undecodable) as error:
            self._follower.lost(f"a replay from {start} was not answered ({type(error).__name__})")

    async def _read_replay(self, endpoint: str, start: int) -> bool:
        """Read a replay; False where it is of another engine than what was read before.

        Its socket is its own, so that what comes late reaches nobody. Raises TimeoutError and Undecodable.
        """
        import zmq  # noqa: PLC0415 - an extra

        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, QUEUED)
            asking.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            asking.connect(endpoint)
            await asking.send_multipart(kv_events.replay_request(start))
            for number in range(MOST_REPLAYED):
                async with asyncio.timeout(self._waits.replay_s):
                    frames = await asking.recv_multipart()
                message = kv_events.message(frames[1:])
                if message.batch is None:
                    break
                verdict = self._order.judge(message)
                if verdict is Verdict.RESTARTED:
                    return False
                if verdict is Verdict.GAP:  # what lies before is no longer held
                    if self._order.next:
                        self._follower.lost(f"messages {self._order.next} to {message.sequence - 1} are lost")
                    self._restart(message.sequence)
                if verdict is not Verdict.OLD:
                    await self._read(message)
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
        return True
