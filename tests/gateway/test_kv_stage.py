"""A gateway whose replica tells cache events, with an engine and a publisher of the test's own."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ctxgate.gateway.config import KvEvents, Replica
from ctxgate.gateway.kv_stage import SILENT_US
from ctxgate.gateway.kv_watch import Follower
from ctxgate.inference.kv_events import Batch, Removed, Stored
from ctxgate.routing.snapshot import Knowledge
from support.behaviours import plays
from support.gateway import HELLO, Gateway, bearer, config, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.client import Answer
    from support.upstream import Upstream

PLACE = ("standard", "standard-0")
BLOCK = 16


class Publisher:
    """The engine's side of its event stream."""

    def __init__(self) -> None:
        self.context: Any = zmq.asyncio.Context()
        self.live = self.context.socket(zmq.XPUB)
        self.port = self.live.bind_to_random_port("tcp://127.0.0.1")
        self.number = 0

    async def tell(self, *events: dict[str, Any]) -> None:
        batch = msgspec.msgpack.encode([0.0, list(events), 0])
        await self.live.send_multipart((b"", self.number.to_bytes(8, "big"), batch))
        self.number += 1

    async def stored(self, first: int, last: int, session: str) -> None:
        parent = first - 1 if first > 1 else None
        blocks = list(range(first, last + 1))
        fields = {"block_hashes": blocks, "parent_block_hash": parent, "token_ids": [], "block_size": BLOCK}
        await self.tell({"type": "BlockStored", "medium": "GPU", "session_id": session} | fields)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    one = Publisher()
    yield one
    one.context.destroy(linger=0)


@pytest.fixture
async def gateway(upstream: Upstream, publisher: Publisher, tmp_path: Path) -> AsyncIterator[Gateway]:
    one = await started(upstream, publisher.port, tmp_path)
    await publisher.live.recv()  # its subscription
    yield one
    await one.stop()


async def started(upstream: Upstream, port: int, folder: Path) -> Gateway:
    plain = config(folder / "ledger.db", [upstream.url])
    replica = Replica("standard-0", upstream.url, KvEvents(f"tcp://127.0.0.1:{port}"))
    pool = replace(plain.pools["standard"], replicas=(replica,))
    return await Gateway.start(replace(plain, pools={"standard": pool}, cache_salt_secret=b"s" * 32))


def turn(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return HELLO | {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]}


async def asked(
    gateway: Gateway, upstream: Upstream, body: dict[str, Any], *, task: str = "t", **usage: Any
) -> Answer:
    upstream.play(plays(lambda exchange: exchange.answer(**usage)))
    answer = await gateway.post(body, headers=(bearer(), ("x-ctxgate-task", task), ("x-session-id", "mine")))
    assert answer.status == 200
    return answer


async def test_a_session_is_the_same_in_every_turn_and_no_other_task_or_key_has_it(
    gateway: Gateway, upstream: Upstream
) -> None:
    bodies = [turn("a"), turn("a", "b", "c"), turn("z")]
    for body in bodies:
        await asked(gateway, upstream, body)
    await asked(gateway, upstream, turn("a"), task="other")
    one, two, other_talk, other_task = (call.header("x-session-id") for call in upstream.calls)
    assert one == two
    assert len({one, other_talk, other_task, "mine"}) == 4
    assert len(one) == 32
    assert int(one, 16)


async def test_routing_h2_without_events_no_session_goes_out_and_nothing_is_kept_of_any(
    upstream: Upstream, tmp_path: Path
) -> None:
    gateway = await Gateway.start(config(tmp_path / "ledger.db", [upstream.url]))
    kept = gateway.services.kv.sessions.size
    for _ in range(3):
        await gateway.post(HELLO, headers=(bearer(), ("x-session-id", "mine")))
    assert gateway.services.kv.sessions.size == kept
    await gateway.stop()
    assert upstream.calls[0].header("x-session-id") == ""


async def test_what_events_tell_is_what_is_expected_and_metered(
    gateway: Gateway, upstream: Upstream, publisher: Publisher
) -> None:
    places = gateway.services.kv.sessions
    await asked(gateway, upstream, turn("a"), prompt=100, cached=0, completion=1)
    session = upstream.calls[0].header("x-session-id")
    await publisher.stored(1, 6, session)
    await until(lambda: places.knowledge(PLACE) is Knowledge.EXACT)
    await publisher.tell({"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU"})
    await until(lambda: places.place(PLACE).tick == 2)
    answer = await asked(gateway, upstream, turn("a", "b", "c"), prompt=150, cached=80, completion=1)
    assert answer.header("x-ctxgate-expected-cached") == "80"
    rows = await gateway.rows()
    assert sorted(row.opened.predicted_cached_tokens or 0 for row in rows) == [0, 80]
    samples = await gateway.metrics()
    place = 'pool="standard",replica="standard-0"'
    assert samples[f'ctxgate_kv_predictions_total{{outcome="right",{place}}}'] == 1
    assert samples[f"ctxgate_kv_knowledge{{{place}}}"] == 2
    assert samples["ctxgate_kv_index_bytes"] > 0


async def test_what_lies_unread_at_the_choice_is_read_before_it(
    gateway: Gateway, upstream: Upstream, publisher: Publisher
) -> None:
    kv = gateway.services.kv
    await asked(gateway, upstream, turn("a"), prompt=100, cached=0, completion=1)
    await publisher.stored(1, 6, upstream.calls[0].header("x-session-id"))
    await until(lambda: kv.sessions.knowledge(PLACE) is Knowledge.EXACT)
    unread = [Batch((Removed((5,), "GPU"),)), Batch((Removed((4,), "GPU"),))]

    def read() -> None:
        while unread:
            kv.sessions.apply(PLACE, unread.pop())

    kv.catching_up[PLACE] = read
    answer = await asked(gateway, upstream, turn("a", "b", "c"), prompt=150, cached=48, completion=1)
    assert answer.header("x-ctxgate-expected-cached") == "48"


async def test_routing_c13_a_stream_that_says_nothing_is_reported_and_not_believed(
    gateway: Gateway, upstream: Upstream, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    kv, now = gateway.services.kv, gateway.services.steady_us()
    gateway.services.steady_us = lambda: now
    await publisher.stored(1, 2, "somebody")
    await until(lambda: kv.sessions.knowledge(PLACE) is Knowledge.EXACT)
    await asked(gateway, upstream, turn("a"), prompt=1000, cached=0, completion=1)
    follower = Follower(kv, PLACE)
    follower.quiet()
    assert kv.sessions.knowledge(PLACE) is Knowledge.EXACT  # there was no time for it yet
    gateway.services.steady_us = lambda: now + SILENT_US
    with caplog.at_level(logging.WARNING, "ctxgate.gateway.kv_watch"):
        follower.quiet()
        follower.quiet()
    assert caplog.text.count("event stream silent") == 1
    assert kv.sessions.knowledge(PLACE) is Knowledge.DEGRADED
    follower.apply(Batch((Removed((2,), "GPU"),)))
    assert kv.sessions.knowledge(PLACE) is Knowledge.EXACT


async def test_a_replica_that_is_down_is_cold(gateway: Gateway, publisher: Publisher) -> None:
    kv = gateway.services.kv
    await publisher.stored(1, 2, "somebody")
    await until(lambda: kv.sessions.knowledge(PLACE) is Knowledge.EXACT)
    kv.down(PLACE)
    assert kv.sessions.knowledge(PLACE) is Knowledge.COLD


async def test_problems_of_a_stream_are_counted(gateway: Gateway) -> None:
    follower = Follower(gateway.services.kv, PLACE)
    follower.begin(0)
    follower.apply(Batch((Stored((1,), None, BLOCK, "GPU"),), unknown=1))
    follower.lost("messages 3 to 5 are lost")
    follower.begin(6)
    samples = await gateway.metrics()
    place = 'pool="standard"'
    for problem in ("unknown_event", "lost", "begun_anew"):
        name = f'ctxgate_kv_event_problems_total{{{place},problem="{problem}",replica="standard-0"}}'
        assert samples[name] == 1
