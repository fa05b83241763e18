"""How long a turn of a long conversation holds the event loop at a time: CPU of its longest step.

usage: python -m tests.bench.holds [MESSAGES]

A step is what runs between two moments at which other requests may go on. Of each turn, layout and context
stage: first the conversation's first sight, then turns of two new messages each; once as it is, and once in a
window of two thirds of it, which compacts it in its first turn. Only the loop's own thread counts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from tests.bench.planning import MemoryStore, _identified, _refuse
from tests.bench.planning_context import ContextBench

from ctxgate.compression.policy import Level, Policy
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.layout import LayoutStage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Generator, Mapping

MESSAGES: Final = 9000
TOKENS: Final = 1_000_000
TURNS: Final = 5
BYTES_PER_TOKEN: Final = 4


class Timed:
    """Runs work of the event loop and times each of its steps."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self._work = work
        self.steps: list[float] = []

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        while True:
            began = time.thread_time()
            try:
                waits = next(steps)
            except StopIteration as end:
                return end.value
            finally:
                self.steps.append(time.thread_time() - began)
            yield waits


class Store(MemoryStore):
    """A store whose answers take a moment, as those of every real one."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        await asyncio.sleep(0)
        return await super().claim(tenant, claims, reads, now_us)


def conversation(count: int) -> list[dict[str, Any]]:
    """A task and rounds of one call each: `count` messages of `TOKENS` in all, at four bytes a token."""
    size = TOKENS * BYTES_PER_TOKEN // count
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Port the service. Never commit to main."},
    ]
    for number in range((count - 2) // 2):
        function = {"name": "bash", "arguments": json.dumps({"command": f"make part-{number}"})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"Part {number}.", "tool_calls": [call]})
        text = (f"line {number} of src/part.py is fine. " * (2 * size // 32 + 1))[: max(2 * size - 250, 40)]
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": text})
    return messages


async def measured(count: int, window: int | None) -> list[float]:
    """The longest step of each turn, in milliseconds."""
    forms = Forms(Store())
    bench = ContextBench(LayoutStage(forms, _refuse), forms, window)
    messages = conversation(count)
    found: list[float] = []
    for turn in range(TURNS):
        kept = messages[: len(messages) - 2 * (TURNS - 1 - turn)]
        raw = json.dumps({"model": "mock", "messages": kept}).encode()
        timed = Timed(bench.turn(_identified(raw), Policy(Level.SAFE)))
        await timed
        found.append(1000 * max(timed.steps))
    return found


def main(count: int) -> None:
    gc.disable()  # as `ctxgate serve` spares it: its pauses are not those of a turn
    for name, window in (("as it is", None), ("compacted", TOKENS * 2 // 3)):
        first, *later = asyncio.run(measured(count, window))
        print(f"{count:,} messages, {name}: first sight {first:.1f} ms, later turns {max(later):.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES)
