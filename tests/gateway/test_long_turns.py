"""A history of thousands of messages holds the event loop in small steps, counted and not timed.

What is counted are the calls of functions between two moments at which other requests could go on: a step
may look at each message a few times, and may not decode, measure or hash all of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from tests.bench.planning import MemoryStore
from tests.bench.planning_context import ContextBench

from ctxgate.compression.policy import Level, Policy
from ctxgate.gateway.flow import Identified, Inbound, Surface, Task
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.layout import LayoutStage
from ctxgate.inference import wire
from support.long_chats import long_chat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Generator, Mapping
    from types import FrameType

    from ctxgate.gateway.config import Key

ROUNDS: Final = 700
PER_MESSAGE: Final = 8
MORE: Final = 3000


class SlowStore(MemoryStore):
    """A store whose answers take a moment, as those of every real one."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        await asyncio.sleep(0)
        return await super().claim(tenant, claims, reads, now_us)


class Counted:
    """Runs work of the event loop and counts the calls of each of its steps."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self._work = work
        self.steps: list[int] = []

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        calls, here = 0, threading.get_ident()

        def count(_: FrameType, event: str, __: object) -> None:
            nonlocal calls
            if event in ("call", "c_call") and threading.get_ident() == here:
                calls += 1

        while True:
            calls = 0
            sys.setprofile(count)
            try:
                waits = next(steps)
            except StopIteration as end:
                return end.value
            finally:
                sys.setprofile(None)
                self.steps.append(calls)
            yield waits


def identified(messages: list[dict[str, Any]]) -> Identified:
    body = wire.parse(json.dumps({"model": "mock", "messages": messages}).encode())
    items = tuple(body.items("messages"))
    inbound = Inbound("r", Surface.CHAT, {}, body, items, "mock", stream=True, received_at_us=0)
    key = cast("Key", SimpleNamespace(organisation="acme", team="alpha"))
    return Identified(inbound, key, Task("t", "header"), b"root")


def refuse(reason: str) -> None:
    raise AssertionError(f"edits were dropped: {reason}")


@pytest.mark.parametrize("window", [None, 30_000], ids=["as it is", "compacted"])
@pytest.mark.integration
async def test_routing_h4_no_step_does_work_for_all_messages_of_a_long_history(window: int | None) -> None:
    forms = Forms(SlowStore())
    layout = LayoutStage(forms, refuse)
    bench = ContextBench(layout, forms, window)
    messages = long_chat(ROUNDS, words=25)
    for kept in (len(messages) - 5, len(messages)):  # its first sight, and a later turn
        request = identified(messages[:kept])
        counted = Counted(bench.turn(request, Policy(Level.SAFE)))
        _, left_out = await counted
        assert (left_out > 500) == (window is not None)
        assert max(counted.steps) < PER_MESSAGE * kept + MORE, sorted(counted.steps)[-5:]
