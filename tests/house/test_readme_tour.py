"""The commands of the README in the order a newcomer types them, in a scratch folder.

They are typed as the README shows them, but for the ports: free ones take their place.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.recall_probe import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0

SESSION = (
    {"session": "tour", "source": "test", "model": "tiny", "tools": []},
    {"role": "system", "content": "You answer in one word. " * 40},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome"},
)

TRANSCRIPT = re.compile(r"transcript: begin -->\n```text\n(.*?)```\n", re.DOTALL)

pytestmark = pytest.mark.e2e


def without_figures(text: str) -> list[str]:
    """The lines without what changes with the sources and the machine: numbers, widths, a delay's verdict."""
    text = re.sub(r"the difference in TTFT is within noise|TTFT \+[\d.]+ ms", "TTFT", text)
    text = re.sub(r"\d[\d,.]*", "0", text)
    lines = [re.sub(r"[ -]+", " ", line).strip() for line in text.strip().splitlines()]
    booked = next(at for at, line in enumerate(lines) if line.startswith("task requests"))
    return lines[:booked] + sorted(lines[booked:])  # by cost, of which two are nearly the same


class Tour:
    """A scratch folder with free ports for the ones that the README shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ExitStack() as open_sockets:
            ports = [open_sockets.enter_context(socket.socket()) for _ in range(3)]
            for one in ports:
                one.bind(("127.0.0.1", 0))
            fast, standard, gateway = (str(one.getsockname()[1]) for one in ports)
        self.replaced = {
            "8001": fast,
            "8002": standard,
            "8080": gateway,
        }
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }

    def typed(self, text: str) -> str:
        """`text` with the README's ports replaced by the tour's."""
        for shown, own in self.replaced.items():
            text = text.replace(shown, own)
        return text

    def run(self, command: str) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            shlex.split(self.typed(command)),
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            env=self.environment,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, command: str, port: str) -> Iterator[None]:
        """A server that runs until the block ends; it answers /health when the block begins."""
        log = self.folder / f"{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                shlex.split(self.typed(command)),
                cwd=self.folder,
                stdout=output,
                stderr=output,
                env=self.environment,
            )
            try:
                self._await_health(process, f"http://127.0.0.1:{self.replaced[port]}/health", log)
                yield
                process.terminate()
                assert process.wait(30) in (0, -signal.SIGTERM), log.read_text()
            finally:
                process.kill()
                process.wait()

    def _await_health(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)  # not listening yet
        pytest.fail(f"{url} did not answer within {READY_S:.0f} s\n{log.read_text()}")


def test_the_readme_from_the_key_to_the_report(tmp_path: Path) -> None:
    tour = Tour(tmp_path)
    key = json.loads(tour.run("ctxgate keys new --id tour --team research --json"))
    (tmp_path / "session.jsonl").write_text("".join(json.dumps(line) + "\n" for line in SESSION))
    example = (ROOT / "configs/ctxgate.yaml").read_text()
    entry = f'keys:\n  - {{id: tour, team: research, sha256: "{key["entry"]["sha256"]}"}}\n'
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/ctxgate.yaml").write_text(
        tour.typed(example[: example.index("\nkeys:\n") + 1]) + entry
    )
    tour.environment["CTXGATE_KEY"] = key["secret"]

    assert "tour" in tour.run("ctxgate check -c configs/ctxgate.yaml")
    lines = tour.run("ctxgate pools command -c configs/ctxgate.yaml")
    assert lines.count("-m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B") == 2
    case = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "expect": {"regex": "."}}
    (tmp_path / "cases.jsonl").write_text(json.dumps(case) + "\n")
    with (
        tour.serving("ctxgate twin --profile fast --port 8001", "8001"),
        tour.serving("ctxgate twin --profile standard --port 8002", "8002"),
        tour.serving("ctxgate serve -c configs/ctxgate.yaml", "8080"),
    ):
        replayed = tour.run("ctxgate replay session.jsonl --to http://127.0.0.1:8080")
        probed = tour.run("ctxgate pools probe -c configs/ctxgate.yaml")
        compared = tour.run("ctxgate pools compare fast standard --cases cases.jsonl -c configs/ctxgate.yaml")
        recalled = tour.run("ctxgate probe-recall --pool fast --lengths 500,1000 --out recall.json")
    assert "tour" in replayed
    assert probed.count("reports cached tokens yes") == 2
    assert "the same answer        100.0% (1 of 1" in compared
    assert "not even the shortest length finds 90% of the needles" in recalled  # the twin cannot read
    assert decode((tmp_path / "recall.json").read_bytes()).calls == 2 + 2 * 11

    assert "tour" in tour.run("ctxgate report --by task")
    report = json.loads(tour.run("ctxgate report --by pool --json"))
    assert {row["group"] for row in report["rows"]} == {"fast", "standard"}  # the probe's calls went to both
    assert tour.run("ctxgate report --misses").startswith("Nothing matched: no settled attempt here missed")
    assert "saved USD" in tour.run("ctxgate report --counterfactual")
    assert "shipped/optimum" in tour.run("ctxgate replay session.jsonl --policies")
    report = json.loads(tour.run("ctxgate report --by pool --json --organisation acme"))
    (row,) = report["rows"]
    assert row["requests"] == len([line for line in SESSION if line.get("role") == "assistant"])


def test_the_readme_explains_a_miss(tmp_path: Path) -> None:
    tour = Tour(tmp_path)
    system = "You are an agent. Current time: 2026-11-30 10:0{}:07. Read before you edit. "
    for name, minute in (("first", 1), ("second", 2)):
        body = {"model": "tiny", "messages": [{"role": "system", "content": system.format(minute)}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    explained = tour.run("ctxgate explain --request first.json --after second.json")
    assert "volatile_in_head (clock) at messages[0].content" in explained


def test_make_run_once_prints_the_table_and_ends() -> None:
    done = subprocess.run(
        ["make", "run", "ONCE=1", f"VENV={sys.prefix}"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "through ctxgate" in done.stdout
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = TRANSCRIPT.search(readme)
    assert shown is not None
    printed = done.stdout[done.stdout.index("An agent has reviewed") :]
    assert without_figures(printed) == without_figures(shown[1])
