"""The same recorded sessions through several real replicas, once under each way of routing them.

Half of the replicas are a fast pool of few sequences, half a standard one of many; all serve one tiny model.
Their caches are emptied between two runs, each gateway begins without knowledge, and the requests are the
same: the recorded history goes on whatever an engine says. `hits` are the engines' own counts.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from ctxgate.gateway.sessions import read_session
from e2e.engine import ROOT, SERVED_NAME, Counters, Engine, Spec, running
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, engine_idle, serving, sha256, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.sessions import Session

POLICIES: Final = ("ctxgate", "round-robin", "session-hash", "lmetric")
SESSIONS: Final = ROOT.parent / "shared" / "trajectories"
AT_ONCE: Final = 8
OUTPUT: Final = 8
MOST_BYTES: Final = 40_000  # of a request: one core must compute it
SEQUENCES: Final = {"fast": 4, "standard": 16}
IDLE_S: Final = 120.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True)
class Target:
    """Where the requests go: a root URL, what is sent beside them, and the model's name there."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = SERVED_NAME


@dataclass(frozen=True)
class Run:
    """What one run took: prompt and cached tokens by the engines' counts, seconds to first texts."""

    name: str
    engines: tuple[Counters, ...]
    ttfts: tuple[float, ...]
    failed: int

    @property
    def prompt(self) -> int:
        return sum(one.prompt for one in self.engines)

    @property
    def hits(self) -> int:
        return sum(one.cached for one in self.engines)


def recorded(sessions: int, turns: int) -> list[list[dict[str, Any]]]:
    """Bodies of the first `turns` requests of so many shared sessions, without model; [] without any."""
    found: list[Session] = [read_session(path) for path in sorted(SESSIONS.glob("*.jsonl"))]
    chosen = [bodies for one in found if (bodies := _bodies(one, turns))]
    return chosen[:sessions]


def _bodies(session: Session, turns: int) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    for turn in session.turns():
        body: dict[str, Any] = {"messages": [dict(message) for message in turn.messages]}
        if turn.tools:
            body["tools"] = [dict(tool) for tool in turn.tools]
        if len(bodies) == turns or len(json.dumps(body)) > MOST_BYTES:
            break
        bodies.append(body)
    return bodies if len(bodies) > 1 else []


@contextmanager
def replicas(python: Path, folder: Path, count: int) -> Iterator[dict[str, list[Engine]]]:
    """So many running engines, by pool."""
    specs = [
        Spec(
            f"{pool}-{number}",
            ("--max-model-len", "32768", "--max-num-seqs", str(SEQUENCES[pool])),
            environment={
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # its cache can be emptied
            },
        )
        for number in range((count + 1) // 2)
        for pool in ("standard", "fast")
    ][:count]
    with running(python, folder, *specs) as engines:
        yield {
            pool: [engine for engine in engines if engine.name.startswith(pool)]
            for pool in ("standard", "fast")
            if any(engine.name.startswith(pool) for engine in engines)
        }


@contextmanager
def gateway(folder: Path, pools: Mapping[str, Sequence[Engine]], policy: str) -> Iterator[Target]:
    """A new gateway over the engines that routes by one policy."""
    folder.mkdir()
    urls = {name: [engine.url for engine in engines] for name, engines in pools.items()}
    config = _Routed(folder, urls, isolation="none", policy=policy)
    with serving(config) as served:
        yield Target(served.url, {"authorization": f"Bearer {TRUSTED_SECRET}"})


@dataclass(frozen=True)
class _Routed(GatewayConfig):
    """One model over all pools, routed by `policy`."""

    policy: str = "ctxgate"

    def write(self) -> Path:
        """Write the file."""
        path = super().write()
        document = json.loads(path.read_text())
        pools = document["pools"]
        for name, pool in pools.items():
            pool["profile"] = name
        document["models"] = {
            SERVED_NAME: {"pools": list(pools), "served_name": SERVED_NAME, "routing": self.policy}
        }
        assert any(key["sha256"] == sha256(TRUSTED_SECRET) for key in document["keys"])
        path.write_text(json.dumps(document, indent=1))
        return path


def run(
    name: str, target: Target, engines: Sequence[Engine], tasks: Sequence[Sequence[Mapping[str, Any]]]
) -> Run:
    """All requests of all tasks, so many tasks at once, from empty caches on."""
    for engine in engines:
        _await_idle(engine)
        _empty(engine)
    before = [engine.counters() for engine in engines]
    ttfts, failed = asyncio.run(_all(name, target, tasks))
    for engine in engines:
        _await_idle(engine)
    counts = tuple(engine.counters() - old for engine, old in zip(engines, before, strict=True))
    return Run(name, counts, tuple(ttfts), failed)


def _await_idle(engine: Engine) -> None:
    until(lambda: engine_idle(engine), IDLE_S, f"{engine.name} is idle")


def _empty(engine: Engine) -> None:
    request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["success"] is True


async def _all(
    name: str, target: Target, tasks: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[list[float], int]:
    waiting = list(enumerate(tasks))[::-1]
    ttfts: list[float] = []
    failed = 0
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:

        async def work() -> None:
            nonlocal failed
            while waiting:
                number, bodies = waiting.pop()
                for body in bodies:
                    ttft = await _ask(session, target, body, f"{name}-{number}")
                    if ttft is None:
                        failed += 1
                    else:
                        ttfts.append(ttft)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return ttfts, failed


async def _ask(
    session: aiohttp.ClientSession, target: Target, body: Mapping[str, Any], task: str
) -> float | None:
    """Seconds to the first text of an answer that ended as it should, else None."""
    document = dict(body) | {
        "model": target.model,
        "stream": True,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {**target.headers, "x-ctxgate-task": task, "x-session-id": task}
    began, first, ended = time.monotonic(), None, False
    url = f"{target.url}/v1/chat/completions"
    async with session.post(url, json=document, headers=headers) as answer:
        if answer.status != 200:
            return None
        async for event in _events(answer):
            if event == b"[DONE]":
                ended = True
            elif first is None and _has_text(event):
                first = time.monotonic() - began
    return first if ended else None


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip()


def _has_text(event: bytes) -> bool:
    choices = json.loads(event).get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content") or delta.get("tool_calls") or choices[0].get("finish_reason"))


def compared(
    folder: Path,
    pools: Mapping[str, Sequence[Engine]],
    tasks: Sequence[Sequence[Mapping[str, Any]]],
    policies: Sequence[str] = POLICIES,
) -> list[Run]:
    """One run under each policy of the gateway."""
    engines = [engine for each in pools.values() for engine in each]
    runs = []
    for policy in policies:
        with ExitStack() as stack:
            target = stack.enter_context(gateway(folder / policy, pools, policy))
            runs.append(run(policy, target, engines, tasks))
    return runs
