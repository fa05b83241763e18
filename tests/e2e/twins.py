"""`ctxgate twin` processes that a test kills, stops and starts again at the same address."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.demo_servers import ctxgate_command
from e2e.engine import Engine, free_port
from e2e.gateway_process import until

if TYPE_CHECKING:
    import signal
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
