"""The systems under measurement, each a process tree of its own behind one port."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.bench.bodies import MODEL
from tests.bench.tools import ROOT, Tools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

POLL_S: Final = 0.005


class StartError(Exception):
    """A system that did not answer a request; the text ends with the last lines it wrote."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a system is given when it starts."""

    port: int
    upstream: str  # root of the mock server
    folder: Path  # its own, empty


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start it, and what its clients send along."""

    command: tuple[str, ...]
    headers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 30.0
    reshapes: bool = False  # its streams may hold more chunks than the upstream's


@dataclass(frozen=True, slots=True)
class Spec:
    """One line of the comparison. `prepare` writes its settings and returns the launch."""

    name: str
    prepare: Callable[[Place], Launch]


@dataclass(frozen=True, slots=True)
class Running:
    """A started system. `start_s` is the time from its start to its first answered request."""

    name: str
    port: int
    headers: tuple[str, ...]
    process: subprocess.Popen[bytes]
    start_s: float
    reshapes: bool = False

    def stop(self) -> None:
        """Ask the whole tree to end, then make it."""
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Cores:
    """Where to run what. On two cores the gateway has one, mock and load generator share the other."""

    gateway: int
    mock: int
    load: int

    @staticmethod
    def choose() -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return Cores(cores[0], cores[1 % len(cores)], cores[2] if len(cores) > 2 else cores[-1])

    def __str__(self) -> str:
        return f"gateway on core {self.gateway}, mock on {self.mock}, load generator on {self.load}"


def pinned(core: int, command: tuple[str, ...]) -> list[str]:
    return ["taskset", "-c", str(core), *command]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start(spec: Spec, upstream: str, folder: Path, core: int) -> Running:
    """Start a system and wait until it has answered a chat request. Raises StartError."""
    folder.mkdir(parents=True)
    port = free_port()
    launch = spec.prepare(Place(port, upstream, folder))
    process, began = _spawn(launch.command, launch.env, folder, core)
    running = Running(spec.name, port, launch.headers, process, 0.0)
    why = "no answer"
    while time.monotonic() - began < launch.start_timeout_s and process.poll() is None:
        why = first_answer(port, launch.headers)
        if not why:
            start_s = time.monotonic() - began
            return Running(spec.name, port, launch.headers, process, start_s, launch.reshapes)
        time.sleep(POLL_S)
    running.stop()
    text = (folder / "log").read_text(errors="replace")[-1500:]
    raise StartError(f"{spec.name}: {why}; exit code {process.poll()}\n{text}")


def start_mock(tools: Tools, folder: Path, core: int) -> Running:
    """The upstream itself; measured as `direct`."""
    port = free_port()
    folder.mkdir(parents=True)
    process, began = _spawn((*tools.mock, "--port", str(port)), {}, folder, core)
    while first_answer(port, ()):
        if process.poll() is not None or time.monotonic() - began > 10:
            raise StartError(
                "the mock upstream did not start\n" + (folder / "log").read_text(errors="replace")
            )
        time.sleep(POLL_S)
    return Running("direct", port, (), process, time.monotonic() - began)


def first_answer(port: int, headers: tuple[str, ...]) -> str:
    """Send one chat request. "" when it is answered, else what went wrong."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
    sent = dict(header.split(": ", 1) for header in headers) | {"content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v1/chat/completions", body, sent)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    finally:
        connection.close()
    return "" if answer.status == 200 else f"status {answer.status}: {text[:300]!r}"


def post(port: int, path: str) -> None:
    """A control request to the mock."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path)
        connection.getresponse().read()
    finally:
        connection.close()


def _spawn(
    command: tuple[str, ...], env: Mapping[str, str], folder: Path, core: int
) -> tuple[subprocess.Popen[bytes], float]:
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "NO_PROXY": "127.0.0.1,localhost"}
    environment = dict(os.environ) | own | dict(env)
    with (folder / "log").open("wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            pinned(core, command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, began


# ---- ours and the floor -------------------------------------------------------------------------


def prepare_floor(place: Place) -> Launch:
    module = (sys.executable, "-m", "tests.bench.floor")
    return Launch((*module, "--port", str(place.port), "--upstream", place.upstream))


def prepare_ctxgate(place: Place, layout: str = "off") -> Launch:
    secret = "cg-" + secrets.token_hex(24)
    config = place.folder / "ctxgate.yaml"
    config.write_text(ctxgate_yaml(place, hashlib.sha256(secret.encode()).hexdigest(), layout))
    command = (sys.executable, "-m", "ctxgate.gateway.cli", "serve", "-c", str(config))
    return Launch(command, (f"authorization: Bearer {secret}",))


def ctxgate_yaml(place: Place, digest: str, layout: str) -> str:
    """A key with a team, a priced pool, the SQLite ledger; what is not named is what users get.

    Without a layout there is no compaction either: both are what no other gateway does.
    """
    context = ", context: {compaction: off}" if layout == "off" else ""
    return f"""\
listen: {{host: 127.0.0.1, port: {place.port}}}
store: {{sqlite: "{place.folder / "ledger.db"}"}}
pools:
  standard:
    replicas: ["{place.upstream}"]
    rates:
      effective: 2026-01-01
      usd_per_million_uncached: 0.40
      usd_per_million_cached: 0.04
      usd_per_million_output: 1.60
    probe: false
models:
  {MODEL}: {{pools: [standard]}}
teams:
  bench: {{organisation: bench, layout: "{layout}"{context}}}
keys:
  - {{id: bench, team: bench, sha256: {digest}}}
"""


FLOOR: Final = Spec("floor", prepare_floor)
CTXGATE: Final = Spec("ctxgate", prepare_ctxgate)
SAFE: Final = Spec("ctxgate-safe", partial(prepare_ctxgate, layout="safe"))
