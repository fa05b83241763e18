"""Replicas that are killed, that hang, and that come back, behind one gateway with streams open.

Twins stand for engines where only their processes matter; one test does the same to a real one.
What a client sees is compared with what the ledger holds: each attempt is settled once.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from ctxgate.gateway.ledger import Outcome
from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, booked, open_rows, serving, until
from e2e.twins import real, twins

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ctxgate.gateway.ledger import Attempt
    from e2e.gateway_process import Gateway
    from e2e.twins import Real, Twin

pytestmark = pytest.mark.e2e
WAIT_S: Final = 120.0
STREAMS: Final = 50
WHOLE: Final = 12
TOKENS: Final = 500  # of a stream: so many that it is under way when its replica is killed
DONE: Final = b"data: [DONE]\n\n"


@dataclass
class Got:
    """What a client got: its status, where it went, the body, and whether that ended as HTTP says."""

    status: int = 0
    replica: str = ""
    expected: int | None = None  # cached tokens, as the gateway foretold
    body: bytes = b""
    clean: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is a whole stream."""
        return self.status == 200 and self.clean and self.body.endswith(DONE)

    @property
    def error(self) -> str:
        """The code of the error event that a stream ended with."""
        last = self.body.rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
        return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])


class Client:
    """Talks to a gateway as its trusted key, each conversation as a task of its own."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._session = session
        self.streams: dict[str, Got] = {}

    async def ask(self, task: str, tokens: int, *, stream: bool, messages: list[Any] | None = None) -> Got:
        """One request; `streams` holds what has come of a stream so far."""
        got = Got()
        if stream:
            self.streams[task] = got
        body = {
            "model": "tiny",
            "messages": messages or [{"role": "user", "content": f"{task} asks something of its own"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        headers = {"authorization": f"Bearer {TRUSTED_SECRET}", "x-ctxgate-task": task}
        url = f"{self._gateway.url}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as answer:
                got.status, got.replica = answer.status, answer.headers.get("x-ctxgate-replica", "")
                expected = answer.headers.get("x-ctxgate-expected-cached")
                got.expected = None if expected is None else int(expected)
                async for chunk in answer.content.iter_any():
                    got.body += chunk
                got.clean = True
        except aiohttp.ClientPayloadError:
            pass  # `clean` tells of it
        return got

    def start(self, prefix: str, count: int, tokens: int, *, stream: bool) -> list[asyncio.Task[Got]]:
        """Many requests at once."""
        return [
            asyncio.create_task(self.ask(f"{prefix}-{number}", tokens, stream=stream))
            for number in range(count)
        ]


async def true(condition: Any, what: str) -> None:
    """Wait until a condition holds, with the event loop free meanwhile."""
    await asyncio.to_thread(until, condition, WAIT_S, what)


def said(gateway: Gateway, words: str) -> bool:
    return words in gateway.log.read_text(errors="replace")


def gauge(gateway: Gateway, name: str, replica: str) -> float:
    """A gauge of one replica."""
    labels = f'pool="standard",replica="{replica}"'
    rows = [line for line in gateway.exposition().splitlines() if line.startswith(f"{name}{{{labels}}}")]
    assert len(rows) == 1, name
    return float(rows[0].rsplit(" ", 1)[1])


def cached(got: Got) -> int:
    """The cached tokens that an answer reports."""
    return int(json.loads(got.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def turns(task: str, count: int) -> list[dict[str, str]]:
    """A conversation of so many questions, each longer than a few cache blocks."""
    messages = []
    for number in range(count):
        messages.append({"role": "user", "content": f"{task} question {number}: " + "word and word " * 60})
        messages.append({"role": "assistant", "content": f"answer {number} " * 20})
    return messages[:-1]


async def warmed(client: Client, replica: str, block: int = 0) -> str:
    """A conversation that its replica knows: its second turn is expected to find the first one."""
    for number in range(40):
        task = f"warm-{number}"
        first = await client.ask(task, 1, stream=False, messages=turns(task, 1))
        assert first.status == 200
        if first.replica == replica:
            second = await client.ask(task, 1, stream=False, messages=turns(task, 2))
            assert second.replica == replica
            assert_expected(second, block)
            return task
    raise AssertionError(f"no conversation of 40 went to {replica}")


def assert_expected(got: Got, block: int) -> None:
    """A hit, and it was foretold."""
    assert got.expected is not None
    assert got.expected > 0
    assert cached(got) > 0
    assert abs(got.expected - cached(got)) <= block


def assert_cut(streams: Sequence[Got], code: str) -> list[Got]:
    """The streams that were cut: all at the first replica, each with an error event as its regular end."""
    cut = [got for got in streams if not got.whole]
    assert cut
    for got in cut:
        assert (got.status, got.replica, got.clean, got.error) == (200, "standard-0", True, code)
        assert b"[DONE]" not in got.body
    return cut


def assert_settled_once(gateway: Gateway, outcome: Outcome, cut: int, completed: int) -> list[Attempt]:
    """Every attempt is settled once, as its client saw it; what else was tried was lost."""
    rows = gateway.rows()
    assert open_rows(gateway.ledger) == 0
    assert len({row.opened.attempt_id for row in rows}) == len(rows)
    found = Counter(row.settled.outcome for row in rows)
    lost = found.pop(Outcome.UNREACHABLE, 0)
    assert found == {outcome: cut, Outcome.COMPLETED: completed}
    lost_at = {row.opened.replica for row in rows if row.settled.outcome is Outcome.UNREACHABLE}
    assert lost_at == ({"standard-0"} if lost else set())
    return rows


async def test_a_replica_that_is_killed_during_50_streams_and_returns_cold(tmp_path: Path) -> None:
    with twins(tmp_path, 3, "--profile", "standard") as replicas:
        await killed(replicas, tmp_path, STREAMS, WHOLE, TOKENS)


async def test_a_real_engine_that_is_killed_during_streams_and_returns_cold(
    vllm_python: Path, tmp_path: Path
) -> None:
    with real(vllm_python, tmp_path, 2) as replicas:
        await killed(replicas, tmp_path, 12, 4, 1_500, block=BLOCK_SIZE)


async def killed(
    replicas: Sequence[Twin | Real], folder: Path, streams: int, whole: int, tokens: int, *, block: int = 0
) -> None:
    """Kill the first replica while so many streams and whole answers are under way, and start it again.

    `block`: by so many tokens a hit may differ from what was expected.
    """
    victim, *others = replicas
    config = GatewayConfig(
        folder, {"standard": [one.url for one in replicas]}, events={"standard-0": victim.events}
    )
    with serving(config) as gateway:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:
            client = Client(gateway, session)
            task = await warmed(client, "standard-0", block)
            before = len(gateway.rows())

            open_streams = client.start("stream", streams, tokens, stream=True)
            answers = client.start("whole", whole, tokens, stream=False)
            await true(lambda: _all_began(client, streams), "all streams have begun")
            alive = {name for name, got in client.streams.items() if not got.clean}
            victim.kill()
            later = client.start("later", streams, 20, stream=True)
            answers += client.start("later-whole", whole, 20, stream=False)
            gone = await asyncio.gather(*open_streams)
            stayed = await asyncio.gather(*answers)
            after = await asyncio.gather(*later)

            # Without a first byte, nothing fails; with one, a stream ends with an error and no [DONE].
            assert [got.status for got in stayed] == [200] * 2 * whole
            assert all(got.whole for got in after)
            cut = assert_cut(gone, "upstream_truncated")
            assert {name for name, got in client.streams.items() if got in cut} <= alive

            # The breaker is open, everything taken is given back, everything is booked once.
            assert gauge(gateway, "ctxgate_replica_healthy", "standard-0") == 0
            await true(gateway.idle, "the gateway is idle")
            completed = 2 * streams - len(cut) + 2 * whole
            rows = assert_settled_once(gateway, Outcome.TRUNCATED, len(cut), before + completed)
            for number, one in enumerate(others, 1):
                its = [row for row in rows if row.opened.replica == f"standard-{number}"]
                assert booked(its) == one.engine.counters()

            await assert_returns_cold(gateway, client, replicas, task, block)


async def assert_returns_cold(
    gateway: Gateway, client: Client, replicas: Sequence[Twin | Real], task: str, block: int
) -> None:
    """What comes back under the first replica's address is another engine: nothing is known of its cache."""
    victim, *others = replicas
    await true(lambda: said(gateway, "standard-0 is down (refused)"), "a probe finds it gone")
    assert gauge(gateway, "ctxgate_kv_knowledge", "standard-0") == 0
    await asyncio.to_thread(victim.start)
    await true(lambda: said(gateway, "standard-0 is up"), "a probe finds it back")
    for number, one in enumerate(others, 1):
        one.kill()
        words = f"standard-{number} is down (refused)"
        await true(partial(said, gateway, words), words)
    cold = await client.ask(task, 1, stream=False, messages=turns(task, 2))
    assert (cold.status, cold.replica) == (200, "standard-0")
    assert not cold.expected
    assert cached(cold) == 0
    warm = await client.ask(task, 1, stream=False, messages=turns(task, 3))
    assert_expected(warm, block)
    await true(lambda: gauge(gateway, "ctxgate_kv_knowledge", "standard-0") == 2, "events are believed again")


async def test_calls_leave_a_replica_that_accepts_and_never_answers(tmp_path: Path) -> None:
    with twins(tmp_path, 3, "--profile", "standard") as replicas:
        # The time without a byte is longer than three silent probes take: what has no answer leaves by these.
        limits = {"idle_timeout_s": 45.0, "first_byte_timeout_s": 600.0, "abort_drain_s": 1.0}
        config = GatewayConfig(tmp_path, {"standard": [one.url for one in replicas]}, limits=limits)
        with serving(config) as gateway:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                client = Client(gateway, session)
                task = await warmed(client, "standard-0")
                before = len(gateway.rows())
                streams = client.start("stream", STREAMS, TOKENS, stream=True)
                whole = client.start("whole", WHOLE, TOKENS, stream=False)
                await true(lambda: _all_began(client, STREAMS), "all streams have begun")
                replicas[0].send(signal.SIGSTOP)
                later = client.start("later", STREAMS, 20, stream=True)
                stayed = await asyncio.gather(*whole)
                after = await asyncio.gather(*later)
                assert said(gateway, "standard-0 is down (silent)")
                assert gauge(gateway, "ctxgate_replica_healthy", "standard-0") == 0
                gone = await asyncio.gather(*streams)

                assert [got.status for got in stayed] == [200] * WHOLE
                assert all(got.whole for got in after)
                assert {got.replica for got in after} <= {"standard-1", "standard-2"}
                cut = assert_cut(gone, "upstream_timeout")
                await true(gateway.idle, "the gateway is idle")
                completed = STREAMS - len(cut) + STREAMS + WHOLE
                rows = assert_settled_once(gateway, Outcome.TIMED_OUT, len(cut), before + completed)
                assert len(rows) > before + completed + len(cut)  # so some did leave it

                # It goes on as the engine that it was.
                replicas[0].send(signal.SIGCONT)
                await true(lambda: said(gateway, "standard-0 is up"), "a probe finds it back")
                await true(
                    lambda: gauge(gateway, "ctxgate_replica_healthy", "standard-0") == 1, "it is healthy"
                )
                again = await client.ask(task, 1, stream=False, messages=turns(task, 3))
                assert (again.status, again.replica) == (200, "standard-0")
                assert_expected(again, 0)


def _all_began(client: Client, count: int) -> bool:
    """Whether every stream's client has its first text."""
    began = [
        got for got in client.streams.values() if b'"content":"' in got.body.replace(b'"content":""', b"")
    ]
    return len(began) == count
