"""A clock in the head makes no new task and no new replica, at any layout level."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.volatile import VolatileKind
from support.gateway import BETA, MODEL, bearer
from support.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from support.gateway import Gateway

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration


@pytest.fixture
async def replicas() -> AsyncIterator[list[Upstream]]:
    """Five scripted upstreams."""
    servers = [Upstream() for _ in range(5)]
    for each in servers:
        await each.start()
    yield servers
    for each in servers:
        await each.stop()


def request(minute: int, *said: str) -> bytes:
    head = f"Request 123e4567-e89b-42d3-a456-4266141740{minute:02}\nNow 2026-01-05T09:{minute:02}:00Z"
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [{"role": "system", "content": head}]
    messages += ({"role": roles[at % 2], "content": text} for at, text in enumerate(said))
    return json.dumps({"model": MODEL, "messages": messages}).encode()


@pytest.mark.parametrize("level", ["off", "safe", "declared", "learned"])
async def test_one_conversation_is_one_task_on_one_replica(
    level: str, replicas: list[Upstream], start_gateway: Start
) -> None:
    kinds = frozenset({VolatileKind.CLOCK})
    # By the root alone: what is warm would draw conversations with one head to one replica.
    by_root = {"routing": "session-hash"}
    gateway = await start_gateway(*replicas, layout=level, volatile=kinds, model=by_root)
    for opening in ("Go.", "Stop.", "Look."):
        said = [opening]
        for minute in range(5):
            assert (await gateway.post(request(minute, *said))).status == 200
            said += ["Yes.", f"And {minute}?"]
    await gateway.post(request(5, "Go."), headers=[bearer(BETA)])
    rows = await gateway.rows()
    assert {row.opened.task_source for row in rows} == {"root"}
    places = {(row.opened.team, row.opened.task, row.opened.replica) for row in rows}
    assert sorted(team for team, _, _ in places) == ["alpha"] * 3 + ["beta"]
    assert len({task for _, task, _ in places}) == 4
    assert len(rows) == 16


async def test_two_gateways_send_a_conversation_to_one_replica(
    replicas: list[Upstream], start_gateway: Start
) -> None:
    fleet = [await start_gateway(*replicas) for _ in range(2)]
    for minute in range(6):
        await fleet[minute % 2].post(request(minute, "Go."))
    assert sorted(len(each.calls) for each in replicas) == [0, 0, 0, 0, 6]
