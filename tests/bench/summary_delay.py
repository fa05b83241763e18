"""Whether a summary delays the request in whose background it is made, and those after it: a real engine.

usage: python -m tests.bench.summary_delay [PAIRS]

Two conversations of the same length take the same turns, one directly after the other, and every other pair
in the other order; their names are as long, so that as much of each is cached. One may be compacted (a call
of the model on its warm prefix), the other one not. Of each:

- `request`: the turn whose answer the summary follows;
- `meanwhile`: a small request of another conversation, sent at the end of that answer, beside the summary;
- `next`: the conversation's own next turn, right after.

A proxy in front of the engine notes when each call reaches the engine and when its answer is whole. What the
client waited beyond that is the gateway's share. The rest is the engine's, on one core of its own: there the
summary takes its part of every step, which is no fault of the gateway and no measure of a GPU.

Needs a vLLM environment (`make vllm`).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest does, for the servers that the tests start

from e2e.engine import Spec, interpreter, running  # noqa: E402 - behind the path
from e2e.gateway_process import (  # noqa: E402 - behind the path
    SECRET,
    Gateway,
    GatewayConfig,
    await_ready,
    start,
    stop,
    until,
)
from support.summaries import conversation  # noqa: E402 - behind the path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAIRS: Final = 20
ROUNDS: Final = 60
CONTEXT: Final = {
    "compaction": "auto",
    "summarizer": "warm_suffix",
    "tail_tokens": 500,
    "summary_tokens": 300,
    "recall": "off",
}
# Cached tokens are as dear as others and words nearly free, so that a summary pays after the second turn.
CHEAP: Final = {
    "effective": "2026-01-01",
    "usd_per_million_uncached": 1.0,
    "usd_per_million_cached": 1.0,
    "usd_per_million_output": 0.01,
}
_PARTS: Final = ("request", "meanwhile", "next")
_PATIENCE: Final = aiohttp.ClientTimeout(total=300)


@dataclass
class Passing:
    """Calls of the engine: what begins their prompt, when each came, and when its answer was whole."""

    url: str = ""
    calls: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Waited:
    """Seconds: what the client waited, and the engine's part of it. `ended`: at what time."""

    whole: float
    engine: float
    ended: float

    @property
    def gateway(self) -> float:
        return self.whole - self.engine


class Settings(GatewayConfig):
    """A gateway to which a summary soon pays."""

    def write(self) -> Path:
        """Write the file."""
        path = super().write()
        document = json.loads(path.read_text())
        for pool in document["pools"].values():
            pool["rates"] = CHEAP
        path.write_text(json.dumps(document))
        return path


@asynccontextmanager
async def passing(engine: str) -> AsyncIterator[Passing]:
    """Pass calls on to an engine until the block ends."""
    found = Passing()

    async def passed(request: web.Request) -> web.Response:
        raw, began = await request.read(), time.perf_counter()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with session.request(
            request.method, engine + request.path_qs, data=raw, headers=headers
        ) as answer:
            body = await answer.read()
        if request.path.endswith("/chat/completions"):
            asked = json.loads(raw)
            kind = "turn" if asked.get("max_tokens") == 8 else "summary"
            found.calls.append((f"{asked['messages'][0]['content']}/{kind}", began, time.perf_counter()))
        type_ = {"content-type": answer.headers.get("content-type", "application/json")}
        return web.Response(body=body, status=answer.status, headers=type_)

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", passed)
    async with aiohttp.ClientSession(timeout=_PATIENCE) as session, TestServer(app) as server:
        found.url = str(server.make_url("")).rstrip("/")
        yield found


@dataclass
class Bench:
    """A gateway in front of a passed engine."""

    gateway: Gateway
    engine: Passing
    client: aiohttp.ClientSession

    async def ask(self, messages: list[dict[str, Any]], mode: str) -> Waited:
        """One whole answer."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
        headers = {"authorization": f"Bearer {SECRET}", "x-ctxgate-compaction": mode}
        url = f"{self.gateway.url}/v1/chat/completions"
        began = time.perf_counter()
        async with self.client.post(url, json=body, headers=headers) as answer:
            said = await answer.read()
            assert answer.status == 200, said
        ended = time.perf_counter()
        name = f"{messages[0]['content']}/turn"
        _, came, went = next(call for call in reversed(self.engine.calls) if call[0] == name)
        return Waited(ended - began, went - came, ended)

    async def conversation(self, name: str, mode: str) -> tuple[dict[str, Waited], float | None]:
        """The three parts of one conversation, and when its summary reached the engine, if one was made."""
        messages = conversation(ROUNDS)
        messages[0] = {"role": "system", "content": name}
        messages[1] = {"role": "user", "content": f"{name}: {messages[1]['content']}"}  # one of its own
        more = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}]
        small = [
            {"role": "system", "content": f"{name} beside"},
            {"role": "user", "content": "Say a word. " * 20},
        ]
        await self.ask(small, "off")  # warm, as the others are
        await self.ask(messages, "window")  # the turn before it, which must not be compacted yet
        request = await self.ask([*messages, *more], mode)
        meanwhile = await self.ask(small, "off")
        following = await self.ask([*messages, *more, *more], mode)
        await asyncio.to_thread(until, self.gateway.idle, 60.0, "the gateway is idle")
        began = [came for called, came, _ in self.engine.calls if called == f"{name}/summary"]
        found = {"request": request, "meanwhile": meanwhile, "next": following}
        return found, began[0] if began else None


async def measured(engine: str, folder: Path, pairs: int) -> list[tuple[dict[str, Waited], ...]]:
    """For each pair with a summary: the parts with and without it."""
    found: list[tuple[dict[str, Waited], ...]] = []
    async with passing(engine) as proxy, aiohttp.ClientSession(timeout=_PATIENCE) as client:
        settings = Settings(folder, {"standard": [proxy.url]}, context=CONTEXT)
        gateway = await asyncio.to_thread(start, settings)
        bench = Bench(gateway, proxy, client)
        try:
            await asyncio.to_thread(await_ready, gateway)
            await bench.conversation("warm-up", "auto")
            early = 0
            for number in range(pairs):
                parts: dict[str, dict[str, Waited]] = {}
                began: float | None = None
                for mode in ("auto", "window") if number % 2 else ("window", "auto"):
                    parts[mode], summary = await bench.conversation(f"{number:03}-{mode[0]}", mode)
                    began = summary or began
                if began is not None:
                    early += began < parts["auto"]["request"].ended
                    found.append((parts["auto"], parts["window"]))
            print(
                f"{pairs} pairs, {len(found)} with a summary, {early} of which began before the answer's end"
            )
        finally:
            await asyncio.to_thread(stop, gateway)
    return found


def table(found: list[tuple[dict[str, Waited], ...]]) -> str:
    """Medians in milliseconds, and medians of the paired differences."""
    lines = ["| part | of it | with p50 ms | without p50 ms | median of differences ms | quartiles |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for part in _PARTS:
        for name in ("whole", "engine", "gateway"):
            on, off = ([1000 * getattr(pair[at][part], name) for pair in found] for at in (0, 1))
            low, middle, high = statistics.quantiles([a - b for a, b in zip(on, off, strict=True)], n=4)
            cells = (statistics.median(on), statistics.median(off), middle)
            text = " | ".join(f"{cell:+.1f}" if at == 2 else f"{cell:.1f}" for at, cell in enumerate(cells))
            lines.append(f"| {part} | {name} | {text} | {low:+.1f} to {high:+.1f} |")
    return "\n".join(lines)


def main(pairs: int) -> None:
    python = interpreter()
    if python is None:
        raise SystemExit("there is no real engine here: make vllm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(python, folder, Spec("delay", ("--max-model-len", "32768"), core=1)) as (engine,):
            print(table(asyncio.run(measured(engine.url, folder, pairs))))
    print(f"load: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
