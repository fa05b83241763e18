"""A recorded coding session that outgrows the window many times, on a real engine and on the twin.

No request fails, the task and the user's rules stand in every prompt, and each prompt extends the one before
it but where a compaction is told of.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.user_rules import user_rules
from ctxgate.compression.validity import pairing_faults
from ctxgate.gateway.sessions import read_session
from e2e.gateway_process import (
    SECRET,
    GatewayConfig,
    await_ready,
    booked,
    settled_counters,
    start,
    stop,
    until,
)
from support import twin
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine
    from e2e.gateway_process import Gateway

pytestmark = pytest.mark.e2e

SESSION: Final = Path(__file__).parents[3] / "shared" / "trajectories" / "coding-long-a.jsonl"
WINDOW: Final = 32_768
REQUESTS: Final = 110
CONTEXT: Final = {"tail_tokens": 8000, "summary_tokens": 1500}
_PATIENCE: Final = aiohttp.ClientTimeout(total=600)


@dataclass
class Played:
    """What went out for each request, in order, and the compaction that the client was told of."""

    prompts: list[list[dict[str, Any]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def broken(self) -> list[int]:
        """The requests that did not extend the one before."""
        return [
            at
            for at in range(1, len(self.prompts))
            if self.prompts[at][: len(self.prompts[at - 1])] != self.prompts[at - 1]
        ]


@pytest.fixture(scope="module")
def session() -> Session:
    if not SESSION.exists():
        pytest.skip("the recorded sessions lie outside the repository")
    return read_session(SESSION)


@asynccontextmanager
async def in_front_of(url: str, folder: Path, context: dict[str, object]) -> AsyncIterator[Gateway]:
    """A gateway process; its engine may live in this event loop."""
    gateway = await asyncio.to_thread(start, GatewayConfig(folder, {"standard": [url]}, context=context))
    try:
        await asyncio.to_thread(await_ready, gateway)
        yield gateway
    except BaseException:
        gateway.process.kill()
        raise
    await asyncio.to_thread(stop, gateway)


async def play(gateway: Gateway, recorder: Recorder, session: Session, requests: int) -> Played:
    played = Played()
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession(timeout=_PATIENCE) as client:
        for turn in list(session.turns())[:requests]:
            at = len(recorder.asked)
            body = {"model": "tiny", "messages": turn.messages, "tools": turn.tools, "max_tokens": 1}
            async with client.post(
                f"{gateway.url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                said = await answer.text()
                assert answer.status == 200, said
                played.statuses.append(answer.status)
                played.told.append(answer.headers.get("x-ctxgate-compaction", ""))
            own = [
                body for body, status in recorder.asked[at:] if body.get("max_tokens") == 1 and status == 200
            ]
            assert own, [(b.get("max_tokens"), len(b["messages"]), st) for b, st in recorder.asked[at:]]
            played.prompts.append(own[-1]["messages"])
    return played


def check(played: Played, session: Session, requests: int) -> None:
    assert set(played.statuses) == {200}
    turns = list(session.turns())[:requests]
    for turn, sent in zip(turns, played.prompts, strict=True):
        messages = json.loads(json.dumps(turn.messages))
        users = [message for message in messages if message["role"] == "user"]
        head = messages[: messages.index(users[0]) + 1]
        assert sent[: len(head)] == head, "the system messages and the task"
        said = "\n".join(str(message.get("content")) for message in sent)
        for user in users:
            rules = [] if user in sent else user_rules(str(user["content"]))
            assert [rule for rule in rules if rule not in said] == []
        before, after = ([facts_of(json.dumps(one).encode()) for one in each] for each in (messages, sent))
        assert not pairing_faults(after) - pairing_faults(before)
        last, out = str(messages[-1]["content"]), str(sent[-1]["content"])
        assert out.startswith(last) or len(last) > WINDOW, "cut only where it fills the window"
    assert played.broken()
    assert all(played.told[at] != played.told[at - 1] for at in played.broken())


@pytest.mark.parametrize("summarizer", ["warm_suffix", "off"])
async def test_a_session_of_several_windows_on_a_real_engine(
    start_engine: Callable[..., Engine], tmp_path: Path, session: Session, summarizer: str
) -> None:
    engine = await asyncio.to_thread(start_engine, "context", "--max-model-len", str(WINDOW))
    before = engine.counters()
    context = {**CONTEXT, "summarizer": summarizer}
    async with recording(engine.url) as recorder, in_front_of(recorder.url, tmp_path, context) as gateway:
        played = await play(gateway, recorder, session, REQUESTS)
        await asyncio.to_thread(until, gateway.idle, 60.0, "the gateway is idle")
        rows = await asyncio.to_thread(gateway.rows)
    check(played, session, REQUESTS)
    assert booked(rows) == await asyncio.to_thread(settled_counters, engine) - before
    client = [row.opened.client_tokens for row in rows if row.opened.client_tokens is not None]
    assert max(client) > 2 * WINDOW
    assert max(row.settled.usage.prompt or 0 for row in rows) <= WINDOW
    summaries = [row for row in rows if row.opened.purpose == "summary"]
    assert bool(summaries) == (summarizer == "warm_suffix")


async def test_the_whole_session_on_the_twin(tmp_path: Path, session: Session) -> None:
    requests = session.requests
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        in_front_of(recorder.url, tmp_path, {**CONTEXT, "summarizer": "extractive"}) as gateway,
    ):
        played = await play(gateway, recorder, session, requests)
        await asyncio.to_thread(until, gateway.idle, 60.0, "the gateway is idle")
        rows = await asyncio.to_thread(gateway.rows)
        assert booked(rows).prompt == await engine.metric("prompt_tokens_total")
        assert booked(rows).cached == await engine.metric("prompt_tokens_cached_total")
    check(played, session, requests)
