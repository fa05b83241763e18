"""The rows of the comparison and how one cell of it, a row for a system in a round, is measured."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.bench import measure
from tests.bench.bodies import SHORT, Traffic, template
from tests.bench.systems import Cores, Running, pinned, post

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.bench.tools import Tools

PACE_MS: Final = 20
SIZES: Final = {"4k": 4_096, "400k": 400_000, "4m": 4_000_000}
LOAD_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of traffic. `requests` bounds a cell instead of time; `pace_ms` spaces the chunks."""

    name: str
    size: int
    stream: bool
    clients: int
    traffic: Traffic = Traffic.GROWING
    pace_ms: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one cell showed. Milliseconds; CPU of the system's whole process tree."""

    requests: int
    errors: int
    error_samples: tuple[str, ...]
    seconds: float
    cpu_s: float
    load_cpu_s: float
    ttfb_p50: float
    ttfb_p99: float
    ttlb_p50: float
    ttlb_p99: float
    gap_p50: float
    gap_p99: float
    delay_p50: float
    delay_p99: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / self.requests


@dataclass(slots=True)
class Cell:
    """The rounds of a row for one system. A figure is the median of its rounds."""

    rounds: list[Sample] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(float(getattr(sample, figure)) for sample in self.rounds)

    def added(self, direct: Cell, figure: str) -> float:
        """Median of the differences to the direct call of the same round."""
        pairs = zip(self.rounds, direct.rounds, strict=False)
        return statistics.median(
            float(getattr(mine, figure)) - float(getattr(base, figure)) for mine, base in pairs
        )

    @property
    def rate(self) -> float:
        return self.median("rate")

    @property
    def cpu_ms(self) -> float:
        return 1000 * sum(s.cpu_s for s in self.rounds) / max(1, sum(s.requests for s in self.rounds))

    @property
    def errors(self) -> int:
        return sum(sample.errors for sample in self.rounds)


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """Resident memory of a system in MB along many requests, after others have filled what it remembers."""

    filling: int  # requests before
    requests: int
    at_start: float
    marks: tuple[float, ...]  # after the filling, and after each part
    peak: float
    errors: int


def _matrix() -> list[Row]:
    rows: list[Row] = []
    for label, size in SIZES.items():
        for kind in ("stream", "plain"):
            crowd = (1, 16, 32, 64) if kind == "stream" else (1, 16, 64)
            rows.extend(
                Row(f"{label}-{kind}-{clients}", size, kind == "stream", clients) for clients in crowd
            )
    return rows


def _paced(clients: int) -> Row:
    return Row(f"paced-{clients}", 4_096, True, clients, pace_ms=PACE_MS, requests=2 * clients)


ALL_ROWS: Final = (
    *_matrix(),
    Row("4k-stream-1-siblings", 4_096, True, 1, Traffic.SIBLINGS),
    Row("4k-stream-32-siblings", 4_096, True, 32, Traffic.SIBLINGS),
    Row("4m-stream-1-rewritten", 4_000_000, True, 1, Traffic.REWRITTEN),
    Row("4m-stream-1-new", 4_000_000, True, 1, Traffic.NEW),
    _paced(8),
    _paced(32),
)
BAR_ROWS: Final = (
    "4k-stream-1",
    "4k-stream-32",
    "400k-stream-1",
    "400k-stream-32",
    "4m-stream-1",
    "4m-stream-32",
    "paced-8",
    "paced-32",
)
QUICK_ROWS: Final = (
    Row("4k-stream-1", 4_096, True, 1, requests=20),
    Row("400k-plain-16", 400_000, False, 16, requests=32),
    Row("4m-stream-1", 4_000_000, True, 1, requests=3),
    Row("paced-8", 4_096, True, 8, pace_ms=2, requests=8),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every cell needs."""

    tools: Tools
    cores: Cores
    mock: Running
    folder: Path

    def sample(self, system: Running, row: Row, seconds: float) -> Sample:
        """Warm up, then measure one cell."""
        # Of a long conversation all but the end is known: every connection has to have sent it once.
        long = row.traffic is Traffic.GROWING and row.size >= SHORT
        warm = row.clients if long else min(row.clients, 8)
        self._load(system, row, requests=warm, seconds=seconds, paced=False)
        if row.pace_ms:
            post(self.mock.port, f"/mock/pace?ms={row.pace_ms}")
        before = measure.cpu_seconds(system.process.pid)
        found = self._load(system, row, requests=row.requests, seconds=seconds, paced=bool(row.pace_ms))
        cpu_s = measure.cpu_seconds(system.process.pid) - before
        if row.pace_ms:
            post(self.mock.port, "/mock/pace?ms=0")
        return found.sample(cpu_s)

    def memory(
        self, system: Running, requests: int, clients: int, *, filling: int = 0, parts: int = 4
    ) -> MemoryRun:
        """Many small streams; memory after each part. Those that fill what is remembered come before."""
        row = Row("memory", SIZES["4k"], True, clients)
        start = measure.rss_mb(system.process.pid)
        marks: list[float] = []
        errors = 0
        for count in (filling, *[requests // parts] * parts):
            if count:
                found = self._load(system, row, requests=count, seconds=LOAD_TIMEOUT_S, paced=False)
                errors += found.errors
            marks.append(measure.rss_mb(system.process.pid))
        peak = measure.peak_mb(system.process.pid)
        return MemoryRun(filling, requests, start, tuple(marks), peak, errors)

    def _body(self, row: Row) -> Path:
        path = self.folder / f"body-{row.size}-{int(row.stream)}-{row.traffic}.json"
        if not path.exists():
            path.write_bytes(template(row.size, row.traffic, stream=row.stream))
        return path

    def _load(self, system: Running, row: Row, *, requests: int, seconds: float, paced: bool) -> _Found:
        arguments = [
            "--port",
            str(system.port),
            "--body",
            str(self._body(row)),
            "--clients",
            str(row.clients),
        ]
        arguments += [
            "--stream",
            str(int(row.stream)),
            "--timeout",
            "60",
            "--reshaped",
            str(int(system.reshapes)),
        ]
        arguments += ["--requests", str(requests)] if requests else ["--seconds", str(seconds)]
        for header in system.headers:
            arguments += ["--header", header]
        command = pinned(self.cores.load, (*self.tools.load, *arguments))
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=2 * LOAD_TIMEOUT_S)
        return _Found(json.loads(done.stdout), paced)


class _Found:
    """The load generator's answer."""

    def __init__(self, result: dict[str, object], paced: bool) -> None:
        self._result = result
        self._paced = paced
        self.errors = self._int("errors")

    def sample(self, cpu_s: float) -> Sample:
        ttfb, ttlb = self._list("ttfb_us"), self._list("ttlb_us")
        gaps, delays = (self._list("gap_us"), self._list("delay_us")) if self._paced else ([], [])
        samples = self._result["error_samples"]
        return Sample(
            requests=self._int("requests"),
            errors=self.errors,
            error_samples=tuple(str(text) for text in samples) if isinstance(samples, list) else (),
            seconds=self._float("seconds"),
            cpu_s=cpu_s,
            load_cpu_s=self._float("cpu_s"),
            ttfb_p50=quantile_ms(ttfb, 0.5),
            ttfb_p99=quantile_ms(ttfb, 0.99),
            ttlb_p50=quantile_ms(ttlb, 0.5),
            ttlb_p99=quantile_ms(ttlb, 0.99),
            gap_p50=quantile_ms(gaps, 0.5),
            gap_p99=quantile_ms(gaps, 0.99),
            delay_p50=quantile_ms(delays, 0.5),
            delay_p99=quantile_ms(delays, 0.99),
        )

    def _int(self, name: str) -> int:
        return int(self._float(name))

    def _float(self, name: str) -> float:
        value = self._result[name]
        assert isinstance(value, (int, float)), name
        return float(value)

    def _list(self, name: str) -> list[float]:
        value = self._result[name]
        assert isinstance(value, list), name
        return [float(one) for one in value]


def quantile_ms(microseconds: Sequence[float], q: float) -> float:
    """The value with a share `q` at or below it (nearest rank), in milliseconds; nan of nothing."""
    if not microseconds:
        return math.nan
    ordered = sorted(microseconds)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] / 1000
