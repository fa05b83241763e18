"""`ctxgate demo` as a user runs it: the tables, the exit code, and no process left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from ctxgate.gateway.demo_servers import ctxgate_command

pytestmark = pytest.mark.e2e


def children_of(pid: int) -> set[int]:
    """Process ids of the direct children; needs /proc."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {int(each) for each in task.read_text().split()}
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def demo(*arguments: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *ctxgate_command(["demo", *arguments]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
    )


async def test_once_prints_both_ways_and_ends_with_zero(tmp_path: Path) -> None:
    child = await demo("--once", "--turns", "6", folder=tmp_path)
    out, _ = await child.communicate()
    text = out.decode()
    assert child.returncode == 0, text
    assert text.count("direct") >= 3
    for label in ("standard pool", "fast pool", "fast pool, tools shuffled"):
        assert f"{label}: the same prompts, the same hits" in text, text
        assert f"\n{label}: review " in text, text
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the process table from /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_on_until_a_signal_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    child = await demo("--turns", "1", folder=tmp_path)
    assert child.stdout is not None
    seen = ""
    while "curl" not in seen:
        line = await child.stdout.readline()
        assert line, seen
        seen += line.decode()
    servers = children_of(child.pid)
    assert len(servers) == 3
    found = re.search(r"Base URL (\S+)/v1, key (\S+), models", seen)
    assert found is not None, seen
    url, key = found.groups()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        ).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=30)))
    assert answer["usage"]["completion_tokens"] <= 2
    child.send_signal(number)
    await child.communicate()
    assert child.returncode == 128 + number
    assert not [pid for pid in servers if alive(pid)]
    assert os.listdir(tmp_path) == []
