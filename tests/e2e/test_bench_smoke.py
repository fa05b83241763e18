"""The bench runs: real processes, real requests, every table and bar present. No figure is judged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ROWS = {"4k-stream-1": 20, "400k-plain-16": 32, "4m-stream-1": 3, "paced-8": 8}
COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
TOOLS = [
    pytest.param((), id="c", marks=pytest.mark.skipif(not COMPILER, reason="no C compiler")),
    pytest.param(("--python-tools",), id="python"),
]


@pytest.mark.parametrize("tools", TOOLS)
def test_quick_bench_measures_every_system_without_an_error(tools: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    command = [sys.executable, "-m", "tests.bench.bench", "--quick", "--json", str(saved), *tools]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    results = json.loads(saved.read_text())
    assert results["errors"] == []
    assert results["absent"] == {}
    assert set(results["rows"]) == set(ROWS)
    for row, requests in ROWS.items():
        assert set(results["rows"][row]) == {"direct", "floor", "ctxgate", "ctxgate-safe"}
        for system, figures in results["rows"][row].items():
            assert figures["requests"] == requests, (row, system)
            assert 0 < figures["ttfb_p50_ms"] <= figures["ttlb_p50_ms"], (row, system)
            assert (figures["delay_p50_ms"] is not None) == row.startswith("paced"), (row, system)
    planning = [cost for cost in results["planning"] if cost["system"] == "ctxgate"]
    assert {cost["case"]: cost["edits"] > 0 for cost in planning} == {
        "nothing to edit": False,
        "calls re-serialized": True,
        "call ids made up anew": True,
        "clock in the head, declared": True,
        "context stage, nothing recorded": False,
        "context stage, compaction applied": True,
    }
    for cost in planning:
        assert cost["tokens"] == 100_000
        assert cost["cpu_ms"] > 0
        assert 0 < cost["bodies"] < 3, cost
    assert [each["replicas"] for each in results["decisions"]] == [64, 64, 64, 64, 64, 4, 2, 1]
    assert all(0 < each["least_us"] <= each["p50_us"] <= each["p90_us"] for each in results["decisions"])
    assert [each["mode"] for each in results["background"]] == ["off", "window", "auto"]
    assert all(each["requests"] > 0 for each in results["background"])
    assert results["memory_mb"]["ctxgate"]["requests"] == 200
    assert len(results["start_s"]["ctxgate"]) == 1
    measured = {bar["what"] for bar in results["bars"] if bar["value"] is not None}
    assert "4 KB, 1 client: added TTFB p50 / floor" in measured
    assert "start to first answered request" in measured
    for system in ("direct", "floor", "ctxgate", "ctxgate-safe"):
        assert f"| 4k-stream-1   | {system}" in done.stdout


def test_a_row_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "tests.bench.bench", "--only", "5k-stream-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no such row" in done.stderr
    assert "4k-stream-1" in done.stderr
