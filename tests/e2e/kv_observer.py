"""One who reads tokens and hears an engine's cache events: what could be known of a cache at a moment.

Independent of the gateway: the prompt's tokens are the engine's own rendering, blocks are found by the
tokens that events carry, and each event counts from when it was heard here. Where even this observer would
have been wrong of what the engine then found, the cache changed after the moment, or its news had not come.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

WAIT_MS: Final = 20


@dataclass(frozen=True)
class Heard:
    """The events of a step, and the time of day at which they were heard."""

    at_us: int
    events: Sequence[Mapping[str, Any]]

    def any(self, kind: str) -> bool:
        return any(event["type"] == kind for event in self.events)


@dataclass
class Observer:
    """Listens in a thread of its own, as a context manager. `block`: tokens of a block."""

    endpoint: str
    block: int
    heard: list[Heard] = field(default_factory=list)
    _sequences: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Observer:
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(30)

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as live:
            live.setsockopt(zmq.LINGER, 0)
            live.setsockopt(zmq.RCVHWM, 0)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            live.connect(self.endpoint)
            while not self._over.is_set():
                if live.poll(WAIT_MS):
                    _, number, payload = live.recv_multipart()
                    now_us = time.time_ns() // 1000
                    self._sequences.append(int.from_bytes(number, "big"))
                    self.heard.append(Heard(now_us, msgspec.msgpack.decode(payload)[1]))

    @property
    def complete(self) -> bool:
        """Whether every step was heard, from the engine's first one on."""
        return self._sequences == [*range(len(self._sequences))]

    def first(self, kind: str) -> int:
        """When the first event of a kind was heard."""
        return next(one.at_us for one in self.heard if one.any(kind))

    def hits(self, asked: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """For prompts by time of day, in order, as tokens: what the cache was known to hold of each."""
        known = self._blocks()
        copies: Counter[int] = Counter()
        coming = iter([*self.heard, None])
        step = next(coming)
        found: list[int] = []
        for at_us, tokens in asked:
            while step is not None and step.at_us <= at_us:
                for event in step.events:
                    sign = {"BlockStored": 1, "BlockRemoved": -1}[event["type"]]
                    for block in event["block_hashes"]:
                        copies[block] += sign
                step = next(coming)
            found.append(self._hit(tokens, known, copies))
        return found

    def _blocks(self) -> dict[tuple[int | None, tuple[int, ...]], int]:
        """The name of each block, by the one before it and its tokens."""
        known: dict[tuple[int | None, tuple[int, ...]], int] = {}
        for step in self.heard:
            for event in step.events:
                if event["type"] != "BlockStored":
                    continue
                before, tokens = event.get("parent_block_hash"), event["token_ids"]
                for at, block in enumerate(event["block_hashes"]):
                    own = tuple(tokens[at * self.block : (at + 1) * self.block])
                    assert known.setdefault((before, own), block) == block
                    before = block
        return known

    def _hit(
        self,
        tokens: Sequence[int],
        known: Mapping[tuple[int | None, tuple[int, ...]], int],
        copies: Mapping[int, int],
    ) -> int:
        before: int | None = None
        end = self.block
        while end < len(tokens):  # the last token is computed in any case
            before = known.get((before, tuple(tokens[end - self.block : end])))
            if before is None or copies.get(before, 0) <= 0:
                break
            end += self.block
        return end - self.block


def rendered(url: str, body: Mapping[str, object]) -> list[int]:
    """The tokens of a chat prompt, by the engine."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions/render",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["token_ids"]
        return tokens
