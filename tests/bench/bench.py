"""The speed of ctxgate beside a direct call and a minimal Python proxy, interleaved in one run.

usage: python -m tests.bench.bench [--quick] [--only ROW]... [--rounds N] [--seconds S] [--json FILE]

Prints tables and the bars with pass or miss; the exit code is 1 only if requests failed or a system
did not start, never because of a time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench import background, decisions, measure, planning
from tests.bench.report import Results, render
from tests.bench.rows import ALL_ROWS, BAR_ROWS, QUICK_ROWS, Bench, Cell, Row
from tests.bench.systems import CTXGATE, FLOOR, SAFE, Cores, Running, Spec, StartError, start, start_mock
from tests.bench.tools import find_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

QUIET: Final = 0.1  # share of the machine that others may use without spoiling times
FILLING: Final = 60_000
"""Requests before the memory run. What is remembered of conversations is bounded; here the bounds are met."""
OWN: Final = (FLOOR, CTXGATE, SAFE)
OWN_NAMES: Final = frozenset(spec.name for spec in OWN)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures. A cell is measured for `seconds`, once per round and system."""

    specs: tuple[Spec, ...]
    rows: tuple[Row, ...]
    rounds: int
    seconds: float
    memory_requests: int
    memory_filling: int
    starts: int
    planning: bool = True
    background: bool = True
    quick: bool = False
    python_tools: bool = False


def run_plan(plan: Plan, folder: Path, absent: dict[str, str] | None = None) -> Results:
    """Start everything, measure, stop everything, also on a signal. Raises StartError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit runs the `finally` below
    tools, cores = find_tools(python=plan.python_tools), Cores.choose()
    rounds = f"{plan.rounds} interleaved rounds of {plan.seconds:g} s, medians of the rounds"
    results = Results(measure.machine(), [f"{cores}; {tools.note}; {rounds}."], absent=dict(absent or {}))
    if plan.planning:
        noise = Noise(())
        _measure_planning(plan, results)
        if not (plan.rows or plan.memory_requests or plan.background):
            results.notes = [noise.note()]
            return results
    if plan.background:
        _progress("long histories in the background")
        results.background = background.measure(folder, cores, quick=plan.quick)
    mock = start_mock(tools, folder / "mock", cores.mock)
    running = [mock]
    try:
        for spec in plan.specs:
            _start_one(spec, plan, results, running, folder, cores)
        bench = Bench(tools, cores, mock, folder)
        noise = Noise(running)
        first_rss = {one.name: measure.rss_mb(one.process.pid) for one in running}
        _measure_memory(bench, plan, running, results)  # first: the rows' large bodies leave their mark
        _measure_rows(bench, plan, running, results)
        results.notes.append(noise.note())
        for one in running[1:]:
            pid = one.process.pid
            results.rss_mb[one.name] = (first_rss[one.name], measure.peak_mb(pid), measure.rss_mb(pid))
    finally:
        for one in reversed(running):
            one.stop()
    return results


class Noise:
    """How much of the machine others use during a run: what wall-clock figures of it are worth."""

    def __init__(self, running: Sequence[Running]) -> None:
        self._running = running
        self._began = time.monotonic()
        self._busy, self._own = measure.machine_busy_seconds(), self._own_seconds()

    def note(self) -> str:
        """One line for the reader."""
        busy = measure.machine_busy_seconds() - self._busy
        others = max(0.0, busy - (self._own_seconds() - self._own))
        share = others / ((os.cpu_count() or 1) * (time.monotonic() - self._began))
        advice = "" if share < QUIET else " Too much for latencies and rates: trust the CPU columns."
        return f"Other processes used {share:.0%} of the machine meanwhile.{advice}"

    def _own_seconds(self) -> float:
        mine = os.times()  # the load generators are children that have been waited for
        spent = mine.user + mine.system + mine.children_user + mine.children_system
        return spent + sum(measure.cpu_seconds(one.process.pid) for one in self._running)


def _start_one(
    spec: Spec, plan: Plan, results: Results, running: list[Running], folder: Path, cores: Cores
) -> None:
    """Start a system, several times if its start is measured, and keep the last. Peers may fail."""
    upstream = f"http://127.0.0.1:{running[0].port}"
    extra = plan.starts - 1 if spec.name in OWN_NAMES else 0
    times = results.start_s.setdefault(spec.name, [])
    try:
        for attempt in range(extra):
            first = start(spec, upstream, folder / f"{spec.name}-{attempt}", cores.gateway)
            times.append(first.start_s)
            first.stop()
        one = start(spec, upstream, folder / spec.name, cores.gateway)
    except StartError as error:
        if spec.name in OWN_NAMES:
            raise
        results.absent[spec.name] = str(error)
        return
    times.append(one.start_s)
    _progress(f"{spec.name} answers after {one.start_s:.2f} s")
    running.append(one)


def _measure_rows(bench: Bench, plan: Plan, running: Sequence[Running], results: Results) -> None:
    for row in plan.rows:
        cells = results.cells.setdefault(row.name, {one.name: Cell() for one in running})
        for number in range(plan.rounds):
            for one in running:
                _progress(f"{row.name}, round {number + 1} of {plan.rounds}: {one.name}")
                cells[one.name].rounds.append(bench.sample(one, row, plan.seconds))


def _measure_memory(bench: Bench, plan: Plan, running: Sequence[Running], results: Results) -> None:
    for one in running:
        if plan.memory_requests and one.name in OWN_NAMES:
            requests, filling = plan.memory_requests, plan.memory_filling
            _progress(f"memory over {requests:,} requests after {filling:,}: {one.name}")
            results.memory[one.name] = bench.memory(one, requests, clients=64, filling=filling)


def _measure_planning(plan: Plan, results: Results) -> None:
    """In this process, before any other runs; peers in their own environments, where they are installed."""
    _progress("planning at a million tokens")
    results.planning = planning.measure(quick=plan.quick)
    _progress("choosing among 64 replicas")
    results.decisions = decisions.measure(20 if plan.quick else decisions.RUNS)
    for name, python in planning.installed_peers().items():
        _progress(f"counting tokens: {name}")
        try:
            results.planning += planning.measure_peer(name, python, results.planning, quick=plan.quick)
        except subprocess.SubprocessError as error:
            results.absent[f"{name}, counting tokens"] = str(error)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- command line -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `bench` and `peers` share."""
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures mean nothing")
    parser.add_argument(
        "--only",
        action="append",
        metavar="ROW",
        help="rows by name or pattern, `memory`, `planning`, `background`",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="per cell and round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to a file")
    parser.add_argument("--python-tools", action="store_true", help="do not use the C tools")


def make_plan(args: argparse.Namespace, specs: tuple[Spec, ...], rows: tuple[Row, ...]) -> Plan:
    """Raises SystemExit for a pattern that fits no row."""
    only: list[str] = args.only or []
    if args.quick:
        rows = QUICK_ROWS
    chosen = tuple(row for row in rows if not only or any(fnmatch.fnmatchcase(row.name, one) for one in only))
    memory = 200 if args.quick else 20_000
    if only and "memory" not in only:
        memory = 0
    plans = not only or "planning" in only
    behind = not only or "background" in only
    if not (chosen or memory or plans or behind):
        names = " ".join(row.name for row in rows)
        raise SystemExit(f"no such row; rows: memory planning background {names}")
    return Plan(
        specs=specs,
        rows=chosen,
        rounds=1 if args.quick else args.rounds,
        seconds=0.2 if args.quick else args.seconds,
        memory_requests=memory,
        memory_filling=200 if args.quick else FILLING,
        starts=1 if args.quick else 3,
        planning=plans,
        background=behind,
        quick=args.quick,
        python_tools=args.python_tools,
    )


def finish(results: Results, json_file: Path | None) -> int:
    """Print and save; 1 if requests failed."""
    print(render(results))
    if json_file:
        json_file.write_text(json.dumps(results.as_json(), indent=1) + "\n")
    return 1 if results.errors() else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--bars", action="store_true", help="only the rows of the bars")
    names = ",".join(spec.name for spec in OWN)
    parser.add_argument("--systems", default=names, help="comma-separated (%(default)s)")
    args = parser.parse_args(argv)
    specs = tuple(spec for spec in OWN if spec.name in args.systems.split(","))
    rows = tuple(row for row in ALL_ROWS if row.name in BAR_ROWS) if args.bars else ALL_ROWS
    plan = make_plan(args, specs, rows)
    with tempfile.TemporaryDirectory(prefix="ctxgate-bench-") as folder:
        try:
            results = run_plan(plan, Path(folder), None)
        except StartError as error:
            print(error, file=sys.stderr)
            return 1
    return finish(results, args.json)


if __name__ == "__main__":
    sys.exit(main())
