"""Replicas that a test kills, stops and starts again at the same address: twins, and real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.demo_servers import ctxgate_command
from e2e.engine import WINDOW, Engine, Spec, free_port, running
from e2e.gateway_process import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S: Final = 120.0


class Twin:
    """One twin: its port stays the same through its lives. `events`: it publishes its cache events."""

    def __init__(self, name: str, folder: Path, *flags: str, events: bool = False) -> None:
        self.name = name
        self.port = free_port()
        self.events = {"endpoint": f"tcp://127.0.0.1:{free_port()}"} if events else {}
        if events:
            self.events["replay_endpoint"] = f"tcp://127.0.0.1:{free_port()}"
        self._flags = flags
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        """The same server as one whose counters can be read."""
        return Engine(self.name, self.url, self._log)

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        flags = ["twin", "--port", str(self.port), *self._flags]
        if self.events:
            flags += ["--kv-events-endpoint", self.events["endpoint"].replace("127.0.0.1", "*")]
            flags += ["--kv-events-replay-endpoint", self.events["replay_endpoint"].replace("127.0.0.1", "*")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ctxgate_command(flags), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self._healthy, READY_S, f"{self.name} is healthy")

    def _healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False  # not listening yet

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, however it stands; it is gone afterwards."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Real:
    """One real engine, as `Twin`."""

    def __init__(self, name: str, python: Path, folder: Path, core: int, *, events: bool = False) -> None:
        self.name = name
        self.port = free_port()
        self.events = {"endpoint": f"tcp://127.0.0.1:{free_port()}"} if events else {}
        self._python = python
        self._folder = folder
        self._core = core
        self._running = ExitStack()
        self._engine: Engine | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        flags = list(WINDOW)
        if self.events:
            where = self.events["endpoint"].replace("127.0.0.1", "*")
            publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": where}
            flags += ["--kv-events-config", json.dumps(publish)]
        spec = Spec(self.name, flags, core=self._core, port=self.port)
        (self._engine,) = self._running.enter_context(running(self._python, self._folder, spec))

    def kill(self) -> None:
        """kill -9, its workers too; it is gone afterwards."""
        if self._engine is not None:
            with suppress(ProcessLookupError):  # it was killed before
                os.killpg(self._engine.group, signal.SIGKILL)
            self._engine = None
        self._running.close()


@contextmanager
def real(python: Path, folder: Path, count: int) -> Iterator[list[Real]]:
    """So many running engines; the first one publishes its cache events. All are gone at the end."""
    engines = [Real(f"real-{at}", python, folder, at, events=at == 0) for at in range(count)]
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        for engine in engines:
            stack.callback(engine.kill)
        list(pool.map(Real.start, engines))
        yield engines


@contextmanager
def twins(folder: Path, count: int, *flags: str) -> Iterator[list[Twin]]:
    """So many running twins; the first one publishes its cache events. All are gone at the end."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            twin = Twin(f"twin-{number}", folder, *flags, events=number == 0)
            stack.callback(twin.kill)
            twin.start()
            started.append(twin)
        yield started
