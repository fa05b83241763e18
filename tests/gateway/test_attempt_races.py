"""Many requests at once, each failing or leaving in its own way: every attempt is booked exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from support.behaviours import (
    BUSY,
    RESET,
    dies_after,
    plays,
    refuses,
    streams_until_aborted,
    until_aborted,
    vllm_error,
)
from support.client import CHAT
from support.gateway import HELLO, MODEL, bearer, until
from support.upstream import ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

pytestmark = pytest.mark.integration

DONE = b"data: [DONE]\n\n"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | {"stream": True}),
    (CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "stream": True}),
    ("/v1/embeddings", {"model": MODEL, "input": "x"}),
]


def scripted(chance: random.Random) -> Callable[[Exchange], Awaitable[None]]:
    """What an engine does with one request."""
    error = refuses(500, vllm_error("x", "InternalServerError", 500))
    slow = streams_until_aborted("a ", "b ")
    by_kind = [
        ok,
        ok,
        ok,
        BUSY,
        RESET,
        error,
        until_aborted,
        slow,
        dies_after(2, "reset"),
        dies_after(1, "end"),
    ]
    garbage = plays(lambda exchange: exchange.write(b"no http\r\n\r\n"))

    async def behaviour(exchange: Exchange) -> None:
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        one = chance.choice([*by_kind, garbage])
        if one in (slow, by_kind[-1], by_kind[-2]) and not exchange.streams:
            one = ok
        await one(exchange)

    return behaviour


async def client(gateway: Gateway, chance: random.Random, number: int) -> str | None:
    """One client; the task it named if it saw a whole answer, None otherwise."""
    path, body = chance.choice(BODIES)
    async with gateway.wire() as wire:
        wire.request(path, body, [bearer(), ("x-ctxgate-task", f"task-{number}")])
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        match chance.randrange(5):
            case 0:
                wire.reset()
                return None
            case 1:
                return None
        reading = asyncio.create_task(wire.answer())
        patience = chance.choice([5, 50, 500])
        await asyncio.wait([reading], timeout=patience / 1000)
        if not reading.done():
            reading.cancel()
            return None
        answer = reading.result()
        whole = answer.status == 200 and (DONE in answer.body or not body.get("stream"))
        return f"task-{number}" if whole and b'"error"' not in answer.body else None


@pytest.mark.parametrize("seed", range(2))
async def test_every_attempt_is_booked_once_whatever_happens_at_once(
    upstream: Upstream,
    other_upstream: Upstream,
    start_gateway: Callable[..., Awaitable[Gateway]],
    seed: int,
) -> None:
    chance = random.Random(seed)
    limits = Limits(abort_drain_s=0.5, first_byte_timeout_s=2, idle_timeout_s=2)
    gateway = await start_gateway(upstream, other_upstream, limits=limits)
    before = asyncio.all_tasks()
    for server in (upstream, other_upstream):
        server.default = scripted(random.Random(seed + 7))
    upstream.abort_status = 403
    seen = await asyncio.gather(*(client(gateway, chance, number) for number in range(80)))
    await until(lambda: not gateway.state.tasks)
    await gateway.quiet()
    await until(lambda: not (asyncio.all_tasks() - before - upstream._tasks - other_upstream._tasks))
    rows = await gateway.rows()
    ids = [row.opened.attempt_id for row in rows]
    assert len(set(ids)) == len(ids)
    # Every call an engine saw has its row; rows without a call are those that found no connection.
    called = {call.request_id for call in [*upstream.calls, *other_upstream.calls]}
    assert called <= set(ids)
    completed = Counter(row.opened.task for row in rows if row.settled.outcome is Outcome.COMPLETED)
    assert {task for task in seen if task} <= set(completed)
    assert max(completed.values()) == 1
    numbers = Counter((row.opened.request_id, row.opened.attempt_number) for row in rows)
    assert max(numbers.values()) == 1
    assert Outcome.FAILED not in {row.settled.outcome for row in rows}
    metrics = await gateway.metrics()
    assert metrics["ctxgate_open_requests"] == 0
    assert sum(v for k, v in metrics.items() if k.startswith("ctxgate_attempts_total{")) == len(rows)
    cost = sum(v for k, v in metrics.items() if k.startswith("ctxgate_cost_nano_dollars_total{"))
    assert cost == sum(row.settled.charge.total or 0 for row in rows)
