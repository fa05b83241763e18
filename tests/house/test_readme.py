"""Every command that a document shows is run by the test that is named for it.

The documents' `sh` blocks are the source: a command that the table lacks fails, and so does an entry of the
table that no document shows any more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)

TOUR = "tests/house/test_readme_tour.py"
SERVERS = "tests/e2e/test_pools_servers.py"
HERE = "tests/house/test_readme.py"

# Where each command is run: a file that contains it as the document shows it, or a test.
COVERED_BY = {
    "make run": f"{TOUR}::test_make_run_once_prints_the_table_and_ends",
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make unit": f"{HERE}::test_make_unit_is_make_test_without_servers_and_processes",
    "make bench": f"{HERE}::test_make_bench_starts_the_bench",
    "make docs": f"{HERE}::test_make_docs_finds_no_dead_link",
    "ctxgate check -c configs/ctxgate.yaml": TOUR,
    "ctxgate serve -c configs/ctxgate.yaml": TOUR,
    "ctxgate pools probe -c configs/ctxgate.yaml": TOUR,
    "ctxgate pools command -c configs/ctxgate.yaml": TOUR,
    "ctxgate pools up -c configs/ctxgate.yaml": f"{SERVERS}::test_a_pool_is_started_probed_and_ended",
    "ctxgate pools down -c configs/ctxgate.yaml": f"{SERVERS}::test_a_pool_is_started_probed_and_ended",
    "ctxgate pools compare fast standard --cases cases.jsonl -c configs/ctxgate.yaml": TOUR,
    "ctxgate report --by task": TOUR,
    "ctxgate report --by pool --json": TOUR,
    "ctxgate report --misses": TOUR,
    "ctxgate explain --request first.json --after second.json": TOUR,
    "ctxgate replay session.jsonl --to http://127.0.0.1:8080": TOUR,
    "ctxgate replay session.jsonl --policies": TOUR,
    "ctxgate report --counterfactual": TOUR,
    "ctxgate probe-recall --pool fast --lengths 500,1000 --out recall.json": TOUR,
    "ctxgate twin --profile fast --port 8001": TOUR,
    "ctxgate twin --profile standard --port 8002": TOUR,
}


def shown_commands() -> set[str]:
    """Every command line of every `sh` block."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    blocks = [block for text in texts for block in BLOCK.findall(text)]
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def make_prints(*arguments: str) -> str:
    """What `make` would run, without running it, and whatever `make` this test may itself run under."""
    outer = ("MAKE", "PYTEST", "ARGS", "ONCE")
    return subprocess.run(
        ["make", "-n", *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
    ).stdout


def test_every_shown_command_is_run_somewhere() -> None:
    assert shown_commands() == COVERED_BY.keys()


@pytest.mark.parametrize(("command", "place"), COVERED_BY.items())
def test_the_place_that_runs_a_command_exists(command: str, place: str) -> None:
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert (f"def {test}(" if test else command) in text


def test_make_run_starts_the_demo_and_once_stops_it_after_the_table() -> None:
    assert make_prints("run").rstrip().endswith("-m ctxgate.gateway.cli demo")
    assert make_prints("run", "ONCE=1").rstrip().endswith("-m ctxgate.gateway.cli demo --once")
    assert make_prints("run", "ONCE=0").rstrip().endswith("-m ctxgate.gateway.cli demo")


def test_make_unit_is_make_test_without_servers_and_processes() -> None:
    assert (
        make_prints("unit")
        .rstrip()
        .endswith(
            "-m pytest --ignore tests/e2e --ignore tests/contract --ignore tests/property"
            ' -m "not e2e and not integration"'
        )
    )
    assert make_prints("test").rstrip().endswith("-m pytest")


def test_make_bench_starts_the_bench() -> None:
    assert make_prints("bench").rstrip().endswith("-m tests.bench.bench")
    assert make_prints("bench-peers").rstrip().endswith("-m tests.bench.peers")


def test_make_docs_finds_no_dead_link() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_docs.py"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(" 0 dead links\n")
