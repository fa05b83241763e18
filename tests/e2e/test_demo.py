"""`ctxgate demo` as a user runs it: the tables, the exit code, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from ctxgate.gateway.demo_servers import ctxgate_command

pytestmark = pytest.mark.e2e

ENDED_S = 30.0
NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/stat").is_file(), reason="reads the process table in /proc"
)


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ctxgate_command(["demo", *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
    )


def read_until(child: subprocess.Popen[str], word: str) -> str:
    """What the child prints up to the line with this word."""
    assert child.stdout is not None
    seen = ""
    for line in child.stdout:
        seen += line
        if word in line:
            return seen
    pytest.fail(f"ended without {word!r}:\n{seen}")


def state(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process, or None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def children_of(pid: int) -> list[int]:
    every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [each for each in every if (found := state(each)) is not None and found[1] == pid]


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if (found := state(pid)) is not None and found[0] != "Z"]


def test_once_prints_both_ways_and_ends_with_zero(tmp_path: Path) -> None:
    child = demo(tmp_path, "--once", "--turns", "6")
    text, _ = child.communicate()
    assert child.returncode == 0, text
    labels = ("standard pool", "fast pool", "fast pool, tools shuffled", "fast pool, clock in prompt")
    for label in labels:
        assert re.search(rf"^{label}: review +6 +6 ", text, re.MULTILINE)
    lines = text.splitlines()
    direct = [line.split()[1:] for line in lines if line.startswith("  direct ")]
    through = [line.split()[2:] for line in lines if line.startswith("  through ctxgate ")]
    assert [row[0] for row in (*direct, *through)] == ["6"] * 8
    # requests, prompt, cached, uncached, output, cost of a well-behaved client: the gateway changes nothing
    assert [row[:6] for row in direct[:2]] == [row[:6] for row in through[:2]]
    for label in labels[:2]:
        assert f"\n{label}: the same prompts, the same hits, the same cost" in text
    # One that shuffles its tools, or sends the time: the gateway restores the hits of the plain client.
    hits = [
        (int(one[-1].rstrip("%")), int(two[-1].rstrip("%"))) for one, two in zip(direct, through, strict=True)
    ]
    plain = hits[1][1]
    for label, (straight, laid_out) in zip(labels[2:], hits[2:], strict=True):
        assert straight < plain - 10
        assert abs(laid_out - plain) <= 3
        told = f"{label}: the cache serves {laid_out}% of the prompt instead of {straight}%, TTFT p50 is "
        (sentence,) = (line for line in lines if line.startswith(told))
        assert re.search(r"; direct costs [1-9][\d.]* times as much$", sentence)
    assert list(tmp_path.iterdir()) == []


@NEEDS_PROC
def test_it_serves_on_until_it_is_interrupted(tmp_path: Path) -> None:
    child = demo(tmp_path, "--turns", "1")
    seen = read_until(child, "/v1/usage")
    servers = children_of(child.pid)
    assert len(servers) == 3
    found = re.search(r"Base URL (\S+)/v1, key (\S+), models demo, demo-fast", seen)
    assert found is not None
    url, key = found.groups()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "x-ctxgate-task": "by hand",
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["usage"]["prompt_tokens"] > 0
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode == 0
    assert running(servers) == []
    assert list(tmp_path.iterdir()) == []


@NEEDS_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_middle_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    child = demo(tmp_path, "--once", "--turns", "40")
    read_until(child, "gateway   http")
    servers = children_of(child.pid)
    assert len(servers) == 3
    child.send_signal(number)
    child.communicate()
    assert child.returncode == 128 + number
    assert running(servers) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its own")
@NEEDS_PROC
def test_the_children_of_a_killed_demo_end_with_it(tmp_path: Path) -> None:
    child = demo(tmp_path, "--once", "--turns", "40")
    read_until(child, "gateway   http")
    servers = children_of(child.pid)
    assert len(servers) == 3
    with ExitStack() as stack:
        handles = [os.pidfd_open(pid) for pid in servers]
        for handle in handles:
            stack.callback(os.close, handle)
        child.kill()
        child.communicate()
        for handle in handles:  # readable once the process has ended
            assert select.select([handle], [], [], ENDED_S)[0] == [handle]


def test_unusable_arguments_are_refused(tmp_path: Path) -> None:
    child = demo(tmp_path, "--turns", "0")
    text, _ = child.communicate()
    assert child.returncode == 2
    assert text == "ctxgate demo: --turns starts at 1, --port is a TCP port\n"
