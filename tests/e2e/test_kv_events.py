"""Cache events of a real engine: what they say, and that the gateway predicts hits by them to the token."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from ctxgate.inference.kv_events import Removed, Stored
from ctxgate.inference.kv_subscriber import Endpoints, Subscriber
from e2e.engine import BLOCK_SIZE, SERVED_NAME, WINDOW, Spec, free_port, running
from e2e.gateway_process import SECRET, GatewayConfig, serving, until
from e2e.kv_observer import Observer, rendered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.ledger import Attempt
    from ctxgate.inference.kv_events import Batch
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

BLOCKS: Final = 300
"""Of 32 tokens: fourteen conversations of up to 1,200 tokens need more than there are."""

REQUESTS: Final = 600
CONVERSATIONS: Final = 14
NEWS_US: Final = 20_000
"""What was heard so shortly before a choice may have come after it at the gateway, or the other way round."""
WORDS: Final = (
    "block",
    "cache",
    "chunk",
    "def",
    "error",
    "ledger",
    "prefix",
    "price",
    "queue",
    "replica",
    "retry",
    "return",
    "stream",
    "token",
)


@dataclass(frozen=True)
class Stream:
    """Ports of an engine's events."""

    events: int = field(default_factory=free_port)
    replay: int = field(default_factory=free_port)

    def flags(self, *, host: str = "*") -> tuple[str, ...]:
        settings = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        blocks = ("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "8192")
        return (*WINDOW, *blocks, "--kv-events-config", json.dumps(settings))

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(f"tcp://127.0.0.1:{self.events}", f"tcp://127.0.0.1:{self.replay}")

    def config(self) -> dict[str, str]:
        return {
            "endpoint": f"tcp://127.0.0.1:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
        }


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def engine(vllm_python: Path, tmp_path: Path, stream: Stream) -> Iterator[Engine]:
    with running(vllm_python, tmp_path, Spec("small", stream.flags(), core=1)) as (engine,):
        yield engine


class Heard:
    """A follower that keeps all it is told."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.batches: list[Batch] = []
        self.lost_ones: list[str] = []
        self.news = asyncio.Event()

    def begin(self, first: int) -> None:
        self.begun.append(first)
        self.news.set()

    def apply(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.news.set()

    def lost(self, problem: str) -> None:
        self.lost_ones.append(problem)
        self.news.set()

    def quiet(self) -> None:
        pass

    async def until(self, condition: Any) -> None:
        """Wait for news until a condition holds."""
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def stored(self, session: str) -> int:
        """Blocks that a session stored."""
        events = (event for batch in self.batches for event in batch.events)
        return sum(len(one.hashes) for one in events if isinstance(one, Stored) and one.session == session)


def prose(source: random.Random, words: int) -> str:
    return " ".join(source.choices(WORDS, k=words))


async def ask(
    url: str, messages: Sequence[object], headers: dict[str, str], tokens: int = 1
) -> tuple[dict[str, Any], str]:
    """A chat call; its usage and the id that the answer names."""
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": tokens, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        usage: dict[str, Any] = (await answer.json())["usage"]
        return usage, answer.headers.get("x-request-id", "")


async def test_real_events_are_decoded_and_told_again_from_the_start_and_a_restart_is_noticed(
    vllm_python: Path, tmp_path: Path, stream: Stream
) -> None:
    source = random.Random(1)
    heard, late = Heard(), Heard()
    tasks = [asyncio.create_task(Subscriber(stream.endpoints, heard).run())]
    try:
        with running(vllm_python, tmp_path, Spec("one", stream.flags(), core=1)) as (engine,):
            usage, _ = await ask(
                engine.url, [{"role": "user", "content": prose(source, 300)}], {"x-session-id": "A"}
            )
            assert usage["prompt_tokens"] > 4 * BLOCK_SIZE
            await heard.until(lambda: heard.stored("A") == usage["prompt_tokens"] // BLOCK_SIZE)
            for number in range(60):  # more than 300 blocks: some of A's have to go
                long = [{"role": "user", "content": f"{number} {prose(source, 300)}"}]
                await ask(engine.url, long, {"x-session-id": f"B{number}"})
            await heard.until(lambda: heard.stored("B59") > 0)
            events = [event for batch in heard.batches for event in batch.events]
            assert any(isinstance(event, Removed) for event in events)
            assert sum(batch.unknown for batch in heard.batches) == 0
            stored = [event for event in events if isinstance(event, Stored)]
            assert {event.block for event in stored} == {BLOCK_SIZE}
            assert {event.tier for event in stored} == {"GPU"}
            # One that comes late hears the same, from the engine's first message on.
            tasks.append(asyncio.create_task(Subscriber(stream.endpoints, late).run()))
            await late.until(lambda: len(late.batches) >= len(heard.batches))
            assert late.batches == heard.batches
            assert late.begun == [0]
        before = len(heard.begun)
        with running(vllm_python, tmp_path, Spec("two", stream.flags(), core=1)) as (engine,):
            await ask(engine.url, [{"role": "user", "content": prose(source, 300)}], {"x-session-id": "C"})
            await heard.until(lambda: heard.stored("C") > 0)
        assert heard.begun[before:] == [0]
        assert len([batch for batch in heard.batches if batch.events]) > 60
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Conversation:
    """One agent's talk: it grows, and its answers are made up."""

    messages: list[dict[str, str]]
    turns: int = 0


class Agents:
    """Many conversations, taken up in a seeded order; some end, some fork, new ones begin."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.heads = [prose(self.source, 120) for _ in range(3)]
        self.open: list[Conversation] = []

    def next(self) -> Conversation:
        source = self.source
        self.open = [one for one in self.open if len(str(one.messages)) < 7000]
        if len(self.open) < CONVERSATIONS:
            head = {"role": "system", "content": source.choice(self.heads)}
            self.open.append(Conversation([head, self.said()]))
            return self.open[-1]
        one = source.choice(self.open)
        if source.random() < 0.05:  # a fork, which goes on otherwise than the first one will
            one = Conversation([*one.messages])
            self.open.append(one)
        return one

    def said(self) -> dict[str, str]:
        return {"role": "user", "content": prose(self.source, self.source.randint(5, 60))}

    def answered(self, one: Conversation) -> None:
        one.turns += 1
        answer = {"role": "assistant", "content": prose(self.source, self.source.randint(3, 50))}
        one.messages = [*one.messages, answer, self.said()]


async def play(url: str, at_once: int) -> dict[str, list[dict[str, str]]]:
    """Conversations through the gateway, so many requests at a time, each one's turns in order.

    The messages of each request, by the id that its answer named.
    """
    agents, left = Agents(7), REQUESTS
    busy: set[int] = set()
    sent: dict[str, list[dict[str, str]]] = {}

    async def agent() -> None:
        nonlocal left
        while left > 0:
            one = agents.next()
            if id(one) in busy:
                await asyncio.sleep(0)
                continue
            left -= 1
            busy.add(id(one))
            headers = {"authorization": f"Bearer {SECRET}"}
            _, request_id = await ask(url, one.messages, headers, agents.source.choice((1, 8, 40)))
            sent[request_id] = one.messages
            agents.answered(one)
            busy.discard(id(one))

    await asyncio.gather(*(agent() for _ in range(at_once)))
    return sent


@dataclass(frozen=True)
class Judged:
    """A request whose cache was under pressure: tokens predicted, knowable then, and found by the engine.

    `knowable` is None where news that came within NEWS_US before the choice made a difference: two
    listeners hear it at two times.
    """

    predicted: int | None
    knowable: int | None
    found: int


def judged(
    rows: Sequence[Attempt], observer: Observer, engine: Engine, sent: Mapping[str, Sequence[object]]
) -> list[Judged]:
    """The requests behind the first eviction, each beside what an observer knew when it was sent."""
    rows = sorted(rows, key=lambda row: row.opened.opened_at_us)
    bodies = [{"model": SERVED_NAME, "messages": sent[row.opened.request_id]} for row in rows]
    asked = [
        (row.opened.opened_at_us, rendered(engine.url, body)) for row, body in zip(rows, bodies, strict=True)
    ]
    assert [row.settled.usage.prompt for row in rows] == [len(tokens) for _, tokens in asked]
    pressed_us = observer.first("BlockRemoved")
    earlier = observer.hits([(at_us - NEWS_US, tokens) for at_us, tokens in asked])
    result = []
    for row, then, now in zip(rows, earlier, observer.hits(asked), strict=True):
        found = row.settled.usage.cached.value
        assert found is not None
        if row.opened.opened_at_us > pressed_us:
            knowable = now if now == then else None
            result.append(Judged(row.opened.predicted_cached_tokens, knowable, found))
    return result


@pytest.mark.parametrize("at_once", [1, 4])
async def test_under_eviction_what_can_be_known_at_the_choice_is_predicted_to_the_token(
    engine: Engine,
    stream: Stream,
    tmp_path: Path,
    at_once: int,
    record_property: Callable[[str, object], None],
) -> None:
    config = GatewayConfig(tmp_path, {"standard": [engine.url]}, events={"standard-0": stream.config()})
    with Observer(stream.endpoints.events, BLOCK_SIZE) as observer:
        with serving(config) as gateway:
            sent = await play(gateway.url, at_once)
            until(gateway.idle, 30, "the gateway is idle")
            foretold = predictions(gateway.exposition())
            rows = gateway.rows()
        queried, hit = (engine.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
        under_pressure = judged(rows, observer, engine, sent)
    assert observer.complete
    assert len(rows) == REQUESTS
    assert queried - hit > 3 * BLOCKS * BLOCK_SIZE  # the cache was filled several times over
    equal = sum(one.predicted == one.found for one in under_pressure)
    # The engine looks later than the gateway chooses: requests between evict or store, and news takes time.
    knowable = [one for one in under_pressure if one.knowable == one.found]
    known = sum(one.predicted == one.found for one in knowable)
    figures = f"{equal} of {len(under_pressure)}, of the knowable {known} of {len(knowable)}"
    record_property("equal", figures)
    assert len(under_pressure) > REQUESTS // 2
    assert len(knowable) >= 0.8 * len(under_pressure), figures
    assert known >= 0.99 * len(knowable), figures
    assert foretold.total() >= 0.9 * REQUESTS, foretold


def predictions(exposition: str) -> Counter[str]:
    """What was foretold by events, by whether it came true."""
    found: Counter[str] = Counter()
    for line in exposition.splitlines():
        if line.startswith("ctxgate_kv_predictions_total{"):
            found["right" if 'outcome="right"' in line else "wrong"] += int(float(line.rsplit(" ", 1)[1]))
    return found


async def test_routing_c13_an_engine_that_connects_instead_of_listening_is_reported(
    vllm_python: Path, tmp_path: Path, stream: Stream
) -> None:
    flags = stream.flags(host="127.0.0.1")
    with running(vllm_python, tmp_path, Spec("deaf", flags, core=1)) as (engine,):
        config = GatewayConfig(tmp_path, {"standard": [engine.url]}, events={"standard-0": stream.config()})
        with serving(config) as gateway:
            headers, source = {"authorization": f"Bearer {SECRET}"}, random.Random(1)

            def silent() -> bool:
                return "event stream silent" in gateway.log.read_text()

            def told_again() -> bool:
                """The stream was begun behind the request, and the replay told of it: that can be heard."""
                return (
                    'ctxgate_kv_knowledge{pool="standard",replica="standard-0"} 2.0' in gateway.exposition()
                )

            await ask(gateway.url, [{"role": "user", "content": prose(source, 400)}], headers)
            until(lambda: silent() or told_again(), 60, "the silence is reported, or a replay read")
            if not silent():
                await ask(gateway.url, [{"role": "user", "content": prose(source, 400)}], headers)
            until(silent, 60, "the silence is reported")
            problem = 'problem="silent",replica="standard-0"'
            assert f'ctxgate_kv_event_problems_total{{pool="standard",{problem}}} 1.0' in gateway.exposition()
