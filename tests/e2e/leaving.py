"""Clients that hang up: seeded requests over raw connections, each leaving at a point of its own.

A plain socket, because a client library hides when a connection is really closed.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS: Final = ("def", "return", "cache", "block", "token", "prefix", "ledger", "stream", "chunk", "retry")
_END_OF_HEADERS: Final = b"\r\n\r\n"
_DONE: Final = b"data: [DONE]"
_READ: Final = 4096  # small, so that a client can leave between two chunks


class Point(StrEnum):
    """When a client leaves."""

    STAYS = "stays"
    HALF_BODY = "half of the request sent"
    SENT = "the request just sent"
    WAITING = "a while after the request"
    HEADERS = "headers read"
    FIRST = "first event read"
    MIDDLE = "some events read"
    DONE = "[DONE] read, the connection still open"


LEAVING: Final = tuple(point for point in Point if point is not Point.STAYS)
_WHOLE_ANSWERS: Final = (Point.HALF_BODY, Point.SENT, Point.WAITING, Point.HEADERS)


@dataclass(frozen=True)
class Visit:
    """One request and how its client behaves. `wait_s` and `events` refine WAITING and MIDDLE."""

    path: str
    body: dict[str, Any]
    point: Point = Point.STAYS
    wait_s: float = 0.0
    events: int = 0
    reset: bool = False  # leave by RST instead of FIN
    task: str = "visits"


@dataclass
class Seen:
    """What the client saw of its answer."""

    visit: Visit
    received: bytearray = field(default_factory=bytearray)
    left: bool = False

    @property
    def status(self) -> int | None:
        """The HTTP status, None where the client left before it."""
        return int(self.received[9:12]) if self.received.startswith(b"HTTP/1.1 ") else None

    @property
    def begun(self) -> bool:
        """Whether any event has come."""
        return b"data: " in self.received

    @property
    def events(self) -> int:
        return self.received.count(b"data: ")

    @property
    def whole(self) -> bool:
        """Whether the answer ended as it should."""
        if self.visit.body.get("stream"):
            return _DONE in self.received
        return self.status == 200 and self.received.rstrip().endswith(b"}")


@dataclass
class Crowd:
    """Makes visits from a seed: a `share` of them leaves early, at every kind of point."""

    task: str
    seed: int
    share: float = 1 / 3
    choices: Sequence[int] = (1,)
    prompts: int = 1  # more than one: completions only
    longest_answer: int = 160
    longest_wait_s: float = 1.5
    model: str = "tiny"
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def visits(self, count: int) -> list[Visit]:
        """So many visits, a share of which leaves."""
        leaving = set(self.random.sample(range(count), round(count * self.share)))
        return [self._visit(number in leaving, number) for number in range(count)]

    def _visit(self, leaves: bool, number: int) -> Visit:
        stream = self.random.random() < 0.6
        points = LEAVING if stream else _WHOLE_ANSWERS
        return Visit(
            *self._request(stream, self.random.choice(self.choices)),
            point=points[number % len(points)] if leaves else Point.STAYS,
            wait_s=self.random.uniform(0, self.longest_wait_s),
            events=self.random.randint(2, 40),
            reset=self.random.random() < 0.5,
            task=self.task,
        )

    def _request(self, stream: bool, n: int) -> tuple[str, dict[str, Any]]:
        limit = self.random.randint(1, self.longest_answer)
        body: dict[str, Any] = {"model": self.model, "max_tokens": limit, "ignore_eos": True}
        if n > 1:
            body["n"] = n
        if stream:
            body["stream"] = True
            if self.random.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        head = f"Head {self.random.randrange(4)}. " + "The rules stay the same all the time. " * 30
        tail = " ".join(self.random.choices(WORDS, k=self.random.randint(3, 300)))
        if self.prompts > 1:
            return "/v1/completions", body | {"prompt": [f"{i} {head}{tail}" for i in range(self.prompts)]}
        if self.random.random() < 0.6:
            messages = [{"role": "system", "content": head}, {"role": "user", "content": tail}]
            return "/v1/chat/completions", body | {"messages": messages}
        return "/v1/completions", body | {"prompt": head + tail}


async def crowd(url: str, secret: str, visits: Sequence[Visit], connections: int) -> list[Seen]:
    """Make all visits, so many at a time; what each client saw, in the order of the visits."""
    waiting = list(enumerate(visits))[::-1]
    seen: dict[int, Seen] = {}

    async def client() -> None:
        while waiting:
            number, visit = waiting.pop()
            seen[number] = await pay(url, secret, visit)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(client())
    return [seen[number] for number in range(len(visits))]


async def pay(url: str, secret: str, visit: Visit, seen: Seen | None = None) -> Seen:
    """Make one visit. `seen`, where given, is filled while it lasts. A reset connection is an end."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
    seen = seen or Seen(visit)
    try:
        await _send(writer, secret, visit, address.netloc)
        seen.left = await _stay(reader, visit, seen)
    except ConnectionError:
        pass  # what was received by then tells how far the answer came
    finally:
        if visit.reset and seen.left:
            writer.transport.abort()
        writer.close()
    return seen


async def _send(writer: asyncio.StreamWriter, secret: str, visit: Visit, host: str) -> None:
    body = json.dumps(visit.body).encode()
    head = (
        f"POST {visit.path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {secret}\r\n"
        f"x-ctxgate-task: {visit.task}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + (body[: len(body) // 2] if visit.point is Point.HALF_BODY else body))
    await writer.drain()


async def _stay(reader: asyncio.StreamReader, visit: Visit, seen: Seen) -> bool:
    """Read until it is time to leave; False where the answer ended first."""
    if visit.point in (Point.HALF_BODY, Point.SENT):
        return True
    if visit.point is Point.WAITING:
        try:
            async with asyncio.timeout(visit.wait_s):
                await _read(reader, seen, lambda: False)
        except TimeoutError:
            return True
        return False
    enough = {
        Point.STAYS: lambda: False,
        Point.HEADERS: lambda: _END_OF_HEADERS in seen.received,
        Point.FIRST: lambda: seen.events >= 1,
        Point.MIDDLE: lambda: seen.events >= visit.events,
        Point.DONE: lambda: _DONE in seen.received,
    }
    return await _read(reader, seen, enough[visit.point])


async def _read(reader: asyncio.StreamReader, seen: Seen, enough: Any) -> bool:
    while data := await reader.read(_READ):
        seen.received += data
        if enough():
            return True
    return False
