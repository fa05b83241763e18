"""Servers that `ctxgate pools up` starts and `ctxgate pools down` ends.

    up    each server in a process group of its own, its output in NAME.log, a record of it in NAME.json;
          then wait until all answer /health and name their models, or end what was started
    down  end what the records name: where the process under a number did not begin when it should have, the
          number belongs to another one by now, which is left alone

The records lie in a folder that is theirs, so a second `up` finds what runs already. One call at a time: the
record of a server that another call is starting is not there yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.inference.pools import KEY_VARIABLE
from ctxgate.inference.probe import windows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ctxgate.gateway.pool_launch import Server

ASK_EVERY_S: Final = 0.5
STOP_S: Final = 30.0
_KILLED_S: Final = 10.0
TAIL_LINES: Final = 30
_ASK_TIMEOUT_S: Final = 5.0
_MAX_ANSWER: Final = 2**20


class ServersFailed(Exception):
    """Servers were not started or ended; the message says why, with the end of a log where that helps."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started: its process, when that began by the system's own word, where it listens."""

    pool: str
    replica: str
    url: str
    pid: int
    began: str


def began(pid: int) -> str | None:
    """When a process began, in words that no later process of that number has; None where none runs.

    Where there is no /proc the moment is known to the second.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        done = subprocess.run(
            ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        state, _, since = done.stdout.strip().partition(" ")
        return since.strip() if since and not state.startswith("Z") else None
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


class State:
    """The folder with the records and logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def log(self, pool: str, replica: str) -> Path:
        """Where a server's output goes."""
        return self._folder / f"{pool}.{replica}.log"

    def _record(self, pool: str, replica: str) -> Path:
        return self._folder / f"{pool}.{replica}.json"

    def save(self, running: Running) -> None:
        """Write a record, whole or not at all."""
        target = self._record(running.pool, running.replica)
        fresh = target.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(running)))
        fresh.replace(target)

    def forget(self, running: Running) -> None:
        """Delete a record."""
        self._record(running.pool, running.replica).unlink(missing_ok=True)

    def make(self) -> None:
        """Make the folder; the logs in it are for its owner alone."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other calls off the folder while the block runs. Raises `ServersFailed` where one runs.

        The system lets go of it where a process is killed; the servers do not inherit it.
        """
        with (self._folder / "lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServersFailed("another `ctxgate pools up` or `down` runs with this folder") from None
            yield

    def records(self, pool: str | None = None) -> list[Running]:
        """What was started, by `pool` or all; files that are no records are left alone."""
        found: list[Running] = []
        for file in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                one = Running(**json.loads(file.read_bytes()))
                if pool in (None, one.pool) and isinstance(one.pid, int) and one.pid > 1:
                    found.append(one)
        return found


def up(servers: Sequence[Server], state: State, say: Callable[[str], None], wait_s: float) -> list[Server]:
    """Start the servers that do not run and wait until all are ready; those that were started.

    Raises `ServersFailed`, also while another call runs; then, and where it is interrupted, what this call
    has started was ended.
    """
    state.make()
    with state.alone():
        return _up(servers, state, say, wait_s)


def _up(servers: Sequence[Server], state: State, say: Callable[[str], None], wait_s: float) -> list[Server]:
    known = {(one.pool, one.replica) for one in state.records() if began(one.pid) == one.began}
    started: list[tuple[Server, Running, subprocess.Popen[bytes]]] = []
    try:
        for server in servers:
            if (server.pool, server.replica) in known:
                say(f"{server.pool}/{server.replica} runs already")
                continue
            started.append(_start(server, state))
            say(f"{server.pool}/{server.replica} starts: {server.url}, process {started[-1][1].pid}")
        deadline = time.monotonic() + wait_s
        for server, _, process in started:
            _await_ready(server, process, state, say, deadline)
    except BaseException:
        for _, running, _ in started:
            _end(running)
            state.forget(running)
        raise
    return [server for server, _, _ in started]


def _start(server: Server, state: State) -> tuple[Server, Running, subprocess.Popen[bytes]]:
    name = f"{server.pool}/{server.replica}"
    if _listens(server):
        raise ServersFailed(f"{name} cannot be started: something listens at {server.url} already")
    environment = os.environ | dict(server.launch.environment)
    if server.api_key is not None:
        environment[KEY_VARIABLE] = server.api_key
    with state.log(server.pool, server.replica).open("wb") as log:
        try:
            process = subprocess.Popen(
                server.launch.arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, which `down` ends whole
            )
        except OSError as error:
            raise ServersFailed(
                f"{name} cannot be started: {server.launch.arguments[0]}: {error.strerror}"
            ) from None
    since = began(process.pid)
    running = Running(server.pool, server.replica, server.url, process.pid, since or "")
    if since is not None:  # else it has ended already, which is told by its log
        state.save(running)
    return server, running, process


def _listens(server: Server) -> bool:
    """Whether somebody listens where a server is to; an unknown host is the server's to report."""
    try:
        with socket.create_connection(server.place, _ASK_TIMEOUT_S):
            return True
    except OSError:
        return False


def _await_ready(
    server: Server,
    process: subprocess.Popen[bytes],
    state: State,
    say: Callable[[str], None],
    deadline: float,
) -> None:
    name = f"{server.pool}/{server.replica}"
    begin = time.monotonic()
    told = 0
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServersFailed(f"{name} ended with code {process.returncode}\n{tail(state, server)}")
        if _answers(server.url + "/health", server) is not None:
            _check_models(server, state)
            say(f"{name} is ready after {time.monotonic() - begin:.0f} s")
            return
        if time.monotonic() - begin >= 10 * (told + 1):
            told += 1
            say(f"{name}: {last_line(state, server)}")
        time.sleep(ASK_EVERY_S)
    raise ServersFailed(f"{name} is not ready in time\n{tail(state, server)}")


def _check_models(server: Server, state: State) -> None:
    body = _answers(server.url + "/v1/models", server)
    try:
        served = windows_of(json.loads(body or b""))
    except ValueError:
        served = {}
    lacking = [name for name in server.names if name not in served]
    if lacking:
        shown = ", ".join(sorted(served)) or "none"
        raise ServersFailed(
            f"{server.pool}/{server.replica} does not serve {', '.join(lacking)}; it serves {shown}\n"
            f"{tail(state, server)}"
        )


def _answers(url: str, server: Server) -> bytes | None:
    """The body of an answer with status 200, else None."""
    headers = {} if server.api_key is None else {"authorization": f"Bearer {server.api_key}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - an http URL, by `pool_launch`
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ASK_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_ANSWER)
            return body if answer.status == 200 else None
    except (urllib.error.URLError, OSError, ValueError):
        return None


def down(state: State, pool: str | None, say: Callable[[str], None]) -> int:
    """End what `up` started; how many servers were ended. Raises `ServersFailed` while another call runs."""
    if not state.records(pool):
        return 0
    with state.alone():
        return _down(state, pool, say)


def _down(state: State, pool: str | None, say: Callable[[str], None]) -> int:
    ended = 0
    for running in state.records(pool):
        name = f"{running.pool}/{running.replica}"
        if _end(running):
            ended += 1
            say(f"{name} ended")
        else:
            say(f"{name} had ended already")
        state.forget(running)
    return ended


def _end(running: Running) -> bool:
    """End a server and its workers; False where it does not run any more."""
    if not running.began or began(running.pid) != running.began:
        return False
    _signal(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while began(running.pid) == running.began and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + _KILLED_S
    # Its workers are of its group, and may outlive it.
    while _signal(running.pid, signal.SIGKILL) and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            os.waitpid(running.pid, os.WNOHANG)  # a child of this process is gone once it was asked after
        time.sleep(0.05)
    return True


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; False where nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def tail(state: State, server: Server) -> str:
    """The last lines that a server wrote."""
    file = state.log(server.pool, server.replica)
    lines = _read_end(file).splitlines()[-TAIL_LINES:]
    return "\n".join([*(f"  {line}" for line in lines), f"  the whole log: {file}"])


def last_line(state: State, server: Server) -> str:
    """The last line that a server wrote."""
    lines = _read_end(state.log(server.pool, server.replica)).split("\n")
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "starting")


def _read_end(file: Path, size: int = 65_536) -> str:
    with file.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(log.tell() - size, 0))
        return log.read().decode(errors="replace")
