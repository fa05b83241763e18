"""What others notice of a long history that is planned, indexed and summarized in the background.

One gateway process. In each phase a client sends one small request after the other, and meanwhile another
one holds conversations of 900,000 tokens (at four bytes a token), three turns each, every one new. The phases
differ only in what the gateway may do with these: nothing (`off`), plan and measure them (`window`, which
none of them fills), or compact as well where it pays (`auto`): a summary made by code in the background,
originals archived and indexed. Rounds are interleaved; figures are ratios in the same run.

The upstream answers at once and counts a token for four bytes; it is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from tests.bench.bodies import MODEL, chat_request
from tests.bench.systems import Cores, Launch, Running, Spec, free_port, pinned, prepare_ctxgate, start
from tests.bench.tools import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.bench.systems import Place

TOKENS: Final = 900_000
BYTES_PER_TOKEN: Final = 4
CONVERSATIONS: Final = 2  # in each phase
ROUNDS: Final = 3
WITHIN_S: Final = 30.0
SUMMARY_S: Final = 7.0  # about what planning, summarizing and indexing take
_COMPACTIONS: Final = re.compile(r"^ctxgate_compactions_total\{[^}]*\} (\d+)", re.MULTILINE)
_MODES: Final = ("off", "window", "auto")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One phase. Milliseconds of the small requests, and of the long turns whose answer a summary follows.

    `compactions` made in the background.
    """

    mode: str
    requests: int
    p50_ms: float
    p99_ms: float
    long_p50_ms: float
    compactions: int


@dataclass(frozen=True, slots=True)
class Size:
    """A phase: conversations of so many tokens; seconds a summary may take, and usually takes."""

    tokens: int = TOKENS
    conversations: int = CONVERSATIONS
    within_s: float = WITHIN_S
    summary_s: float = SUMMARY_S


def measure(folder: Path, cores: Cores, *, quick: bool = False) -> list[Disturbance]:
    """A median of the rounds for each mode. Raises StartError, or RuntimeError for a request that failed."""
    size, rounds = (Size(20_000, 1, 0.2, 0.2), 1) if quick else (Size(), ROUNDS)
    port = free_port()
    command = (sys.executable, "-m", "tests.bench.background", "--port", str(port))
    upstream = subprocess.Popen(pinned(cores.mock, command), cwd=ROOT)
    running: Running | None = None
    try:
        _await(port, upstream)
        spec = Spec("ctxgate-context", partial(_prepare))
        running = start(spec, f"http://127.0.0.1:{port}", folder / "background", cores.gateway)
        # Summaries and indexes are made in processes of their own: they get a core to be made on.
        os.sched_setaffinity(running.process.pid, os.sched_getaffinity(0))
        found = [_phase(running, mode, size, n) for n in range(rounds) for mode in _MODES]
    finally:
        if running is not None:
            running.stop()
        upstream.terminate()
        upstream.wait()
    return [_median([each for each in found if each.mode == mode]) for mode in _MODES]


def _prepare(place: Place) -> Launch:
    launch = prepare_ctxgate(place, layout="safe")
    config = place.folder / "ctxgate.yaml"
    context = "{summarizer: extractive, summary_tokens: 1000, tail_tokens: 8000}"
    team = f'bench: {{organisation: bench, layout: "safe", context: {context}}}'
    text = config.read_text()
    config.write_text(re.sub(r"bench: \{organisation: bench, .*\}", team, text))
    return launch


def _phase(gateway: Running, mode: str, size: Size, number: int) -> Disturbance:
    small: list[float] = []
    done = threading.Event()
    before = _compactions(gateway)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}).encode()

    def others() -> None:
        with contextlib.closing(_connection(gateway)) as connection:
            while not done.is_set():
                small.append(_asked(connection, gateway, body, "off"))

    thread = threading.Thread(target=others)
    thread.start()
    try:
        long = [
            _conversation(gateway, mode, size, f"{number}-{each}-{mode}")
            for each in range(size.conversations)
        ]
    finally:
        done.set()
        thread.join()
    small.sort()
    return Disturbance(
        mode,
        len(small),
        1000 * statistics.median(small),
        1000 * small[len(small) * 99 // 100],
        1000 * statistics.median(long),
        _compactions(gateway) - before,
    )


def _conversation(gateway: Running, mode: str, size: Size, name: str) -> float:
    """Three turns, the last one when a summary can be there. Seconds of the second, behind which it is made.

    The first one is all new: its first sight is the same in every mode.
    """
    request = chat_request(size.tokens * BYTES_PER_TOKEN, 8)
    messages = request["messages"]
    for at in (0, 1):  # the head and the task: what follows is the same in all
        messages[at] = {**messages[at], "content": f"{name}: {messages[at]['content']}"}
    before = _compactions(gateway)
    took: list[float] = []
    with contextlib.closing(_connection(gateway)) as connection:
        for count in (len(messages) - 4, len(messages) - 2, len(messages)):
            if len(took) == 2:  # as long as a summary takes, so that all phases idle alike
                _wait(
                    lambda: _compactions(gateway) > before,
                    size.within_s if mode == "auto" else size.summary_s,
                )
            body = json.dumps({**request, "stream": False, "messages": messages[:count]}).encode()
            took.append(_asked(connection, gateway, body, mode))
    return took[1]


def _wait(ended: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until and not ended():
        time.sleep(0.05)


def _connection(gateway: Running) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN_S)


def _asked(connection: http.client.HTTPConnection, gateway: Running, body: bytes, mode: str) -> float:
    headers = dict(header.split(": ", 1) for header in gateway.headers)
    headers |= {"content-type": "application/json", "x-ctxgate-compaction": mode}
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {text[:300]!r}")
    return time.perf_counter() - began


def _compactions(gateway: Running) -> int:
    with contextlib.closing(_connection(gateway)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return sum(map(int, _COMPACTIONS.findall(text.replace(".0\n", "\n"))))


def _median(rounds: list[Disturbance]) -> Disturbance:
    first = rounds[0]
    figures = ("p50_ms", "p99_ms", "long_p50_ms")
    medians = {name: statistics.median(getattr(each, name) for each in rounds) for name in figures}
    return replace(
        first,
        requests=sum(each.requests for each in rounds),
        compactions=sum(each.compactions for each in rounds),
        **medians,
    )


# ---- the upstream -------------------------------------------------------------------------------


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection,
        ):
            connection.request("GET", "/v1/models")
            connection.getresponse().read()
            return
        time.sleep(0.02)
    raise RuntimeError("the upstream does not answer")


async def _chat(request: web.Request) -> web.Response:
    tokens = len(await request.read()) // BYTES_PER_TOKEN
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    message = {"role": "assistant", "content": "ok"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return web.json_response(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": tokens - 8}},
        }
    )


async def _models(_: web.Request) -> web.Response:
    card: dict[str, Any] = {"id": MODEL, "object": "model", "max_model_len": 2**21}
    return web.json_response({"object": "list", "data": [card]})


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _serve(port: int) -> None:
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_serve(parser.parse_args().port))
