"""The ledger against the engines' own counters: equal to the token, whatever the clients do.

vLLM counts a prompt with its first output token and an output token when it is made, also for clients
that have left; a call aborted while it waited is counted nowhere. So over any traffic that comes only
through the gateway, sums over the ledger must be differences of the counters.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_count import PromptCounter
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.oracle import PrefixOracle
from ctxgate.inference.usage import Certainty
from e2e.engine import BLOCK_SIZE, Counters
from e2e.gateway_process import (
    MODELS,
    TRUSTED_SECRET,
    Gateway,
    GatewayConfig,
    assert_priced,
    await_ready,
    booked,
    engine_idle,
    kill,
    ledger_rows,
    open_rows,
    serving,
    settled_counters,
    start,
    until,
)
from e2e.leaving import Crowd, Point, Seen, Visit, crowd, pay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from ctxgate.gateway.ledger import Attempt
    from ctxgate.gateway.replay import Played
    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
WINDOW: Final = 131_072  # of the engines; it ends the long session, no other one
CONNECTIONS: Final = 64
DRAIN_S: Final = 60  # a busy machine may take long to end an aborted call
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"


@pytest.fixture
def gateway(engines: Mapping[str, Engine], tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with a fresh ledger in front of both engines."""
    pools = {name: [engine.url] for name, engine in engines.items()}
    with serving(GatewayConfig(tmp_path, pools, {"abort_drain_s": DRAIN_S})) as running:
        yield running


def counters(engines: Mapping[str, Engine]) -> dict[str, Counters]:
    """Every engine's counters, once it is idle."""
    return {name: settled_counters(engine) for name, engine in engines.items()}


# --- Recorded sessions ---


async def played(
    gateway: Gateway, sessions: Mapping[str, Sequence[Session]], *, stream: bool
) -> list[Played]:
    """Play each model's sessions in order, the models side by side. A salt of its own parts the caches."""
    tokenize = PromptCounter()
    extra = {"ignore_eos": True, "cache_salt": f"stream {stream}"}
    async with Backend(gateway.url, TRUSTED_SECRET) as backend:

        def play(model: str) -> Awaitable[list[Played]]:
            plan = Plan(model, stream, 8, f"{stream}/", max_context=WINDOW, extra=extra)
            oracle = PrefixOracle(BLOCK_SIZE)
            return Player(backend, plan, oracle=oracle, tokenize=tokenize).play(sessions[model])

        return [one for run in await asyncio.gather(*map(play, sessions)) for one in run]


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
async def test_every_recorded_session_is_metered_to_the_token(
    engines: Mapping[str, Engine], gateway: Gateway
) -> None:
    every = [read_session(path) for path in sorted(TRAJECTORIES.glob("*.jsonl"))]
    assert len(every) == 27
    sessions = {model: every[at :: len(MODELS)] for at, model in enumerate(MODELS)}
    before, costs, tokens = counters(engines), {}, {}
    for stream in (True, False):
        done = await played(gateway, sessions, stream=stream)
        assert [one.session for one in done if one.stopped] == ["coding-long-a"]
        measures = [measure for one in done for measure in one.measures]
        assert not [measure.error for measure in measures if measure.error]
        for measure in measures:
            assert measure.usage.prompt == measure.counted, "the engine counts as the local tokenizer does"
            assert measure.usage.cached.value == measure.oracle, "nothing is evicted, all that can hit does"
        costs[stream] = {one.session: [m.cost_nano for m in one.measures] for one in done}
        tokens[stream] = [measure.usage for measure in measures]
        after = counters(engines)
        rows = [row for row in gateway.rows() if row.opened.stream is stream]
        assert len(rows) == len(measures)
        for name in engines:
            mine = [row for row in rows if row.opened.pool == name]
            assert booked(mine) == after[name] - before[name]
            print(f"{name}, stream {stream}: {len(mine)} requests, {booked(mine)}")  # noqa: T201  # figures for the log
        before = after
        assert assert_priced(rows) == sum(cost or 0 for cs in costs[stream].values() for cost in cs)
        assert {row.settled.outcome for row in rows} == {Outcome.COMPLETED}
    assert tokens[True] == tokens[False]
    assert costs[True] == costs[False]


# --- Clients that leave ---


def check_crowd(gateway: Gateway, engine: Engine, seen: Sequence[Seen], task: str) -> list[Attempt]:
    """What holds after every crowd: nothing is open, one row per request that came whole. Its rows."""
    until(gateway.idle, DRAIN_S, "the gateway is idle")
    until(lambda: engine_idle(engine), DRAIN_S, "the engine is idle")
    assert open_rows(gateway.ledger) == 0
    rows = gateway.rows(task=task)
    assert len({row.opened.request_id for row in rows}) == len(rows)
    assert {row.settled.outcome for row in rows} == {Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED}
    for one in seen:
        assert one.left or one.whole, one
    stayed = sum(one.whole for one in seen)
    at_most = sum(one.visit.point is not Point.HALF_BODY for one in seen)
    assert stayed <= len(rows) <= at_most
    return rows


async def test_a_third_of_the_clients_leaving_changes_no_token(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start_engine("narrow", "--max-num-seqs", "10")  # 64 connections: most calls wait
    with serving(GatewayConfig(tmp_path, {"standard": [engine.url]}, {"abort_drain_s": DRAIN_S})) as gateway:
        before = settled_counters(engine)
        seen = await crowd(
            gateway.url,
            TRUSTED_SECRET,
            Crowd("one choice", seed=41, longest_answer=240).visits(300),
            CONNECTIONS,
        )
        rows = check_crowd(gateway, engine, seen, "one choice")
        ended = Counter(row.settled.outcome for row in rows)
        unscheduled = [row for row in rows if row.settled.usage.prompt == 0]
        stopped = [row for row in rows if row.settled.finish_reason == "abort" and row not in unscheduled]
        used = booked(rows)
        print(f"{used}, {dict(ended)}, {len(unscheduled)} aborted in the queue, {len(stopped)} at work")  # noqa: T201  # figures for the log
        assert used == engine.counters() - before
        assert sum(one.left for one in seen) >= 80
        assert ended[Outcome.CLIENT_DISCONNECTED] >= 30
        # Both ways of being aborted were met; how often each, the engine's pace decides.
        assert unscheduled
        assert stopped
        assert all(row.settled.outcome is Outcome.CLIENT_DISCONNECTED for row in unscheduled)
        assert sum(row.settled.charge.total or 0 for row in unscheduled) == 0
        assert_priced(rows)
        await check_several_choices(gateway, engine)
        await check_several_prompts(gateway, engine)


async def check_several_choices(gateway: Gateway, engine: Engine) -> None:
    """Two or three choices and clients that leave: outputs stay exact, prompts within what is known.

    vLLM's usage counts a prompt once, its counters once for each choice that began; how many of them
    had begun when a call was aborted, nobody tells. So the prompt is held between the two.
    """
    before = settled_counters(engine)
    visits = Crowd("choices", seed=43, choices=(2, 3), longest_answer=60).visits(60)
    seen = await crowd(gateway.url, TRUSTED_SECRET, visits, CONNECTIONS)
    rows = check_crowd(gateway, engine, seen, "choices")
    used = engine.counters() - before
    prompts = sum(row.settled.usage.prompt or 0 for row in rows)
    assert prompts <= used.prompt <= 3 * prompts
    check_outputs(rows, used.generation)


async def check_several_prompts(gateway: Gateway, engine: Engine) -> None:
    """Three prompts in a call and clients that leave: usage names them all, also those never begun."""
    before = settled_counters(engine)
    visits = Crowd("prompts", seed=47, prompts=3, longest_answer=60).visits(40)
    seen = await crowd(gateway.url, TRUSTED_SECRET, visits, CONNECTIONS)
    rows = check_crowd(gateway, engine, seen, "prompts")
    used = engine.counters() - before
    assert sum(row.settled.usage.prompt or 0 for row in rows) >= used.prompt
    check_outputs(rows, used.generation)


def check_outputs(rows: Sequence[Attempt], generation: int) -> None:
    """All output is booked, and a call that made none costs nothing."""
    assert sum(row.settled.usage.output.value or 0 for row in rows) == generation
    idle = [row for row in rows if row.settled.usage.output.value == 0]  # how many, the engine's pace decides
    assert all(row.settled.charge.total == 0 for row in idle)


# --- Several choices, several prompts ---


def post(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    """Send one request and read its answer to the end."""
    request = urllib.request.Request(
        gateway.url + path,
        json.dumps(body | {"model": "tiny", "max_tokens": 5, "ignore_eos": True}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {TRUSTED_SECRET}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.read()


PROMPTS: Final[dict[str, list[Any]]] = {
    "one": [7] * 100,
    "tokens": [[8] * 100, [9] * 40, [10] * 70],
    "texts": ["first " * 30, "second " * 20],
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("prompt", "n"), [("one", 2), ("tokens", 1), ("texts", 1), ("texts", 3)])
def test_several_choices_or_prompts(
    engines: Mapping[str, Engine], gateway: Gateway, prompt: str, n: int, stream: bool
) -> None:
    """Usage counts each prompt once; the engine's counters count it once for each of its `n` choices.

    Outputs agree. The reported cached figure is that of one choice of one prompt, so it is nobody's
    total: the ledger must call the cached part unknown, and the price inexact, rather than book it.
    """
    engine = engines["standard"]
    before = settled_counters(engine)
    post(gateway, TEXT, {"prompt": PROMPTS[prompt], "n": n, "stream": stream})
    used = settled_counters(engine) - before
    (row,) = gateway.rows()
    usage = row.settled.usage
    prompts = 1 if prompt == "one" else len(PROMPTS[prompt])
    assert usage.output.value == used.generation == 5 * n * prompts
    assert usage.output.certainty is Certainty.MEASURED
    assert usage.prompt_total.certainty is Certainty.MEASURED
    assert n * (usage.prompt_total.value or 0) == used.prompt
    assert usage.cached.value is None
    assert usage.uncached.certainty is Certainty.ESTIMATED
    assert not row.settled.charge.exact


# --- kill -9 ---


def streams(count: int) -> list[Visit]:
    """Streams over both pools: every third is short, the others outlast the test."""
    return [
        Visit(
            CHAT,
            {
                "model": list(MODELS)[number % 2],
                "messages": [{"role": "user", "content": f"Stream {number}."}],
                "max_tokens": 4 + number % 20 if number % 3 == 0 else 20_000,
                "ignore_eos": True,
                "stream": True,
            },
            task=f"stream-{number}",
        )
        for number in range(count)
    ]


def under_way(seen: Sequence[Seen]) -> bool:
    """Whether all hundred streams have begun and some have ended."""
    return sum(one.begun for one in seen) == 100 and sum(one.whole for one in seen) >= 20


def standing(seen: Sequence[Seen]) -> str:
    """How the streams stand, for a reader of a failure: ends of status and bytes received."""
    return "; ".join(
        f"{one.visit.task}: {one.status}, {bytes(one.received[-200:])!r}" for one in seen if not one.whole
    )


async def test_kill_9_during_a_hundred_streams(engines: Mapping[str, Engine], tmp_path: Path) -> None:
    config = GatewayConfig(tmp_path, {name: [engine.url] for name, engine in engines.items()})
    gateway = start(config)
    await_ready(gateway)
    visits = streams(100)
    seen: list[Seen] = []
    try:
        clients = [asyncio.create_task(watched(gateway, visit, seen)) for visit in visits]
        async with asyncio.timeout(300):
            while not under_way(seen):
                ended = zip(seen, clients, strict=False)
                broken = [one for one, client in ended if client.done() and not one.whole]
                raised = [client.exception() for client in clients if client.done()]
                assert not broken, f"{standing(broken)}; {[error for error in raised if error]}"
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(standing(seen))
    finally:
        kill(gateway)
    await asyncio.gather(*clients)
    finished = {one.visit.task for one in seen if one.whole}
    assert 20 <= len(finished) <= 34
    for engine in engines.values():  # they notice the closed connections
        settled_counters(engine)
    kept = {row.opened.task: row for row in ledger_rows(config.ledger)}
    assert finished <= set(kept)

    with serving(config) as again:
        assert open_rows(config.ledger) == 0
        rows = again.rows()
        assert sorted(row.opened.task for row in rows) == sorted(visit.task for visit in visits)
        outcomes = {row.opened.task: row.settled.outcome for row in rows}
        assert {task for task, outcome in outcomes.items() if outcome is Outcome.COMPLETED} == set(kept)
        assert set(outcomes.values()) == {Outcome.COMPLETED, Outcome.CRASHED}
        assert [row for row in rows if row.opened.task in kept] == list(kept.values())
        booked(kept.values())
        assert_priced(kept.values())
        one_more = await pay(again.url, TRUSTED_SECRET, visits[0])
        assert one_more.whole
    assert len(ledger_rows(config.ledger)) == 101


async def watched(gateway: Gateway, visit: Visit, seen: list[Seen]) -> None:
    """Read one stream as far as it goes; `seen` grows with it. A full ledger is waited for, as clients do."""
    one = Seen(visit)
    seen.append(one)
    while await pay(gateway.url, TRUSTED_SECRET, visit, one):
        if one.status != 503:  # refused before any attempt
            return
        one.received.clear()
        await asyncio.sleep(0.5)
