"""Servers that are started and ended: real processes, with a small server in the engine's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.pool_launch import Server
from ctxgate.gateway.pool_processes import Running, ServersFailed, State, began, down, up
from ctxgate.inference.pools import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

# A worker of its own in the same group, and a server that demands the key.
PROGRAM = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, model = int(sys.argv[1]), sys.argv[2]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, os.environ.get("OWN"), flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers.get("authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
        body = json.dumps({"data": [{"id": model}]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200 if right else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    found = State(tmp_path / "state")
    yield found
    down(found, None, lambda _: None)


def server(port: int, program: str = PROGRAM, *, serves: str = "tiny", name: str = "fast-0") -> Server:
    arguments = (sys.executable, "-c", program, str(port), serves)
    start = Launch(arguments, {"OWN": "set"}, "POOL_KEY")
    return Server("fast", name, f"http://127.0.0.1:{port}", start, ("tiny",), "the-key")


def worker_of(state: State) -> int:
    word, pid, own = state.log("fast", "fast-0").read_text().split()[:3]
    assert (word, own) == ("worker", "set")
    return int(pid)


def test_a_server_starts_serves_and_ends_with_its_workers(state: State, port: int) -> None:
    said: list[str] = []
    one = server(port)
    assert up([one], state, said.append, 60) == [one]
    (record,) = state.records()
    worker = worker_of(state)
    assert os.getpgid(worker) == os.getpgid(record.pid) == record.pid
    assert said[-1].startswith("fast/fast-0 is ready")
    assert up([one], state, said.append, 60) == []
    assert said[-1] == "fast/fast-0 runs already"
    assert down(state, "other", said.append) == 0
    assert down(state, "fast", said.append) == 1
    assert said[-1] == "fast/fast-0 ended"
    assert began(record.pid) is None
    assert began(worker) is None
    assert state.records() == []


def test_two_calls_at_once_start_no_server_that_nobody_knows_of(state: State, port: int) -> None:
    """Else each would start one, and the record of the one that runs would be lost with the other one."""
    said: list[str] = []

    def meanwhile(line: str) -> None:
        said.append(line)
        for call in (
            lambda: up([server(port)], state, said.append, 60),
            lambda: down(state, None, said.append),
        ):
            with pytest.raises(ServersFailed, match="another `ctxgate pools up` or `down` runs"):
                call()

    up([server(port)], state, meanwhile, 60)
    (record,) = state.records()
    assert [line.split(":")[0].split(" after")[0] for line in said] == [
        "fast/fast-0 starts",
        "fast/fast-0 is ready",
    ]
    assert down(state, None, said.append) == 1
    assert began(record.pid) is None


def test_a_number_that_belongs_to_another_process_by_now_is_left_alone(state: State) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        state.make()
        state.save(Running("fast", "fast-0", "http://127.0.0.1:1", other.pid, "an earlier boot:1"))
        said: list[str] = []
        assert down(state, None, said.append) == 0
        assert said == ["fast/fast-0 had ended already"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_that_ends_shows_the_end_of_its_log_and_takes_the_others_with_it(
    state: State, port: int, tmp_path: Path
) -> None:
    broken = server(1, "print('no memory for that'); raise SystemExit(3)", name="fast-1")
    with pytest.raises(ServersFailed, match=r"fast/fast-1 ended with code 3\n  no memory for that\n"):
        up([server(port), broken], state, lambda _: None, 60)
    assert state.records() == []
    assert began(worker_of(state)) is None


def test_a_port_that_is_taken_is_said_before_anything_starts(state: State) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ServersFailed, match="something listens at"),
    ):
        up([server(taken.getsockname()[1])], state, lambda _: None, 60)
    assert state.records() == []


def test_a_server_that_serves_another_model_is_not_ready(state: State, port: int) -> None:
    with pytest.raises(ServersFailed, match="does not serve tiny; it serves other"):
        up([server(port, serves="other")], state, lambda _: None, 60)
    assert state.records() == []


def test_one_that_is_not_ready_in_time_is_ended(state: State, port: int) -> None:
    with pytest.raises(ServersFailed, match="is not ready in time"):
        up([server(port, "import time; time.sleep(600)")], state, lambda _: None, 0)
    assert state.records() == []


def test_an_interpreter_that_is_not_there_is_said(state: State, port: int) -> None:
    one = server(port)
    lost = Launch(("/nowhere/python", *one.launch.arguments[1:]), {}, None)
    with pytest.raises(ServersFailed, match="/nowhere/python: No such file"):
        up([Server("fast", "fast-0", one.url, lost, (), None)], state, lambda _: None, 60)


def test_files_that_are_no_records_are_left_alone(state: State, tmp_path: Path) -> None:
    state.make()
    folder = tmp_path / "state"
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text(json.dumps({"pid": 1}))
    first = {"pool": "p", "replica": "r", "url": "u", "pid": 1, "began": began(1)}
    (folder / "c.json").write_text(json.dumps(first))
    assert state.records() == []
    assert folder.stat().st_mode & 0o077 == 0


def test_a_process_is_known_by_its_beginning() -> None:
    assert began(os.getpid()) == began(os.getpid())
    done = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)
    assert began(done.pid) is None  # ended, though nobody has asked after it
    done.wait()
