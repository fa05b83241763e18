"""A real `ctxgate serve` process in front of real engines: start, read its ledger and gauges, stop.

    config = GatewayConfig(folder, {"standard": [engine.url], "fast": [other.url]})
    with serving(config) as gateway: ...        SIGTERM at the end; its exit code must be 0

Model `tiny` leads to the pool `standard`, `tiny-fast` to `fast`; both are `tiny` to the engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.stores.reader import LedgerReader
from e2e.engine import Counters, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.ledger import Attempt
    from e2e.engine import Engine

SECRET: Final = "cg-" + "e2e" * 12
"""The key of an ordinary client."""

TRUSTED_SECRET: Final = "cg-" + "own" * 12
"""A key that may set fields of the engine: a random model stops anywhere, and salts part the caches."""

SERVED_NAME: Final = "tiny"
MODELS: Final = {"tiny": "standard", "tiny-fast": "fast"}
"""Model name -> its pool."""

USD_PER_MILLION: Final = {
    "standard": {"uncached": "0.40", "cached": "0.043", "output": "1.60"},
    "fast": {"uncached": "1.25", "cached": "0.1257", "output": "10"},
}
"""Rates that leave fractions of a nano-dollar, so that rounding is part of what is compared."""

READY_S: Final = 120.0
STOP_S: Final = 40.0
POLL_S: Final = 0.05
_URL: Final = re.compile(r"^ctxgate listening on (http://127\.0\.0\.1:\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class GatewayConfig:
    """What to write into the configuration file. `pools`: name -> replica URLs."""

    folder: Path
    pools: Mapping[str, Sequence[str]]
    limits: Mapping[str, float] = field(default_factory=dict)
    layout: str | Mapping[str, object] = "off"
    context: str | Mapping[str, object] = "off"
    isolation: str = "team"
    probe: bool = False  # its calls are rows of the ledger too
    events: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by replica

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.db"

    def write(self) -> Path:
        """Write the file; JSON, which is YAML as well."""
        pools = {
            name: {
                "replicas": [self._replica(f"{name}-{i}", url) for i, url in enumerate(urls)],
                "rates": {"effective": "2026-01-01"}
                | {f"usd_per_million_{kind}": float(usd) for kind, usd in USD_PER_MILLION[name].items()},
                "cache_isolation": self.isolation,
                "probe": self.probe,
            }
            for name, urls in self.pools.items()
        }
        models = {
            model: {"pools": [pool], "served_name": SERVED_NAME}
            for model, pool in MODELS.items()
            if pool in pools
        }
        document = {
            "store": {"sqlite": str(self.ledger)},
            "limits": dict(self.limits),
            "pools": pools,
            "models": models,
            "teams": {"research": {"organisation": "acme", "layout": self.layout, "context": self.context}},
            "keys": [
                {"id": "client", "team": "research", "sha256": sha256(SECRET)},
                {
                    "id": "trusted",
                    "team": "research",
                    "sha256": sha256(TRUSTED_SECRET),
                    "allow_engine_fields": ["ignore_eos", "cache_salt"],
                },
            ],
        }
        path = self.folder / "ctxgate.yaml"
        path.write_text(json.dumps(document, indent=1))
        return path

    def _replica(self, name: str, url: str) -> dict[str, object]:
        replica: dict[str, object] = {"name": name, "url": url}
        if name in self.events:
            replica["kv_events"] = dict(self.events[name])
        return replica


def sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class Gateway:
    """A running gateway. `url` is its root; clients add `/v1`."""

    url: str
    ledger: Path
    log: Path
    process: subprocess.Popen[bytes]

    def exposition(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def rows(self, **where: str) -> list[Attempt]:
        """The settled attempts of the ledger, oldest first."""
        return ledger_rows(self.ledger, **where)

    def idle(self) -> bool:
        """Whether no request and no attempt is open, and nothing waits to be written."""
        text = self.exposition()
        names = ("ctxgate_in_flight", "ctxgate_open_requests", "ctxgate_ledger_pending")
        return not any(sample(text, name) for name in names)


@contextmanager
def serving(config: GatewayConfig) -> Iterator[Gateway]:
    """Start a gateway and wait until it is ready; at the end it must leave on SIGTERM with code 0."""
    gateway = start(config)
    try:
        await_ready(gateway)
        yield gateway
    except BaseException:
        gateway.process.kill()
        gateway.process.wait()
        raise
    stop(gateway)


def start(config: GatewayConfig) -> Gateway:
    """Start a gateway on a port that the system picks, and wait for the line that names it."""
    log = config.folder / "gateway.log"
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            ctxgate_command(["serve", "--config", str(config.write()), "--port", "0"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def address() -> str | None:
        assert process.poll() is None, log.read_text(errors="replace")
        found = _URL.search(log.read_bytes()[begin:].decode(errors="replace"))
        return found[1] if found else None

    try:
        url = until(address, READY_S, "the gateway names its address")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Gateway(url, config.ledger, log, process)


def await_ready(gateway: Gateway) -> None:
    """Wait until every pool has a replica that may be chosen."""

    def ready() -> bool:
        assert gateway.process.poll() is None, gateway.log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"{gateway.url}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    until(ready, READY_S, "the gateway is ready")


def stop(gateway: Gateway) -> None:
    """SIGTERM, and a clean exit: code 0, no traceback and no task left behind in the log."""
    gateway.process.terminate()
    try:
        code = gateway.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        gateway.process.kill()
        gateway.process.wait()
        raise
    log = gateway.log.read_text(errors="replace")
    assert code == 0, log
    assert not re.search(r"Traceback|Task was destroyed|was never awaited|ERROR", log), log


def kill(gateway: Gateway) -> None:
    """kill -9: no handler runs, nothing is flushed."""
    gateway.process.send_signal(signal.SIGKILL)
    assert gateway.process.wait(STOP_S) == -signal.SIGKILL


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition`; AssertionError when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(POLL_S)
    return value


def ledger_rows(path: Path, **where: str) -> list[Attempt]:
    """All settled attempts of a ledger file, oldest first."""
    rows: list[Attempt] = []
    with LedgerReader(path) as reader:
        cursor: str | None = None
        while True:
            page = reader.rows(where=where, limit=500, cursor=cursor)
            rows += page.attempts
            cursor = page.cursor
            if cursor is None:
                return rows


def open_rows(path: Path) -> int:
    """How many attempts of a ledger file are open."""
    with closing(sqlite3.connect(path)) as ledger:
        query = "SELECT count(*) FROM attempts WHERE settled_at_us IS NULL"
        count: int = ledger.execute(query).fetchone()[0]
        return count


def booked(rows: Iterable[Attempt]) -> Counters:
    """The tokens of some rows; AssertionError where one is unknown or only estimated."""
    total = Counters(0, 0, 0)
    for row in rows:
        usage = row.settled.usage
        for count in (usage.uncached, usage.cached, usage.output):
            assert count.certainty.value == "measured", row
        assert usage.uncached.value is not None
        assert usage.cached.value is not None
        assert usage.output.value is not None
        total += Counters(usage.uncached.value + usage.cached.value, usage.cached.value, usage.output.value)
    return total


def price(pool: str, uncached: int, cached: int, output: int) -> tuple[int, int, int]:
    """Nano-dollars of three token counts: dollars per million as exact fractions, each rounded half up."""
    rates = {kind: Fraction(usd) * 10**9 / 10**6 for kind, usd in USD_PER_MILLION[pool].items()}
    amounts = (uncached * rates["uncached"], cached * rates["cached"], output * rates["output"])
    return tuple(int(amount + Fraction(1, 2)) for amount in amounts)  # type: ignore[return-value]  # three of them


def assert_priced(rows: Iterable[Attempt]) -> int:
    """Every row costs what its own tokens cost, by a computation of the test's own; returns the sum."""
    total = 0
    for row in rows:
        usage, charge = row.settled.usage, row.settled.charge
        assert usage.uncached.value is not None
        assert usage.cached.value is not None
        assert usage.output.value is not None
        parts = price(row.opened.pool, usage.uncached.value, usage.cached.value, usage.output.value)
        assert (charge.uncached, charge.cached, charge.output) == parts, row
        assert charge.total == sum(parts), row
        assert charge.exact, row
        total += sum(parts)
    return total


def engine_idle(engine: Engine) -> bool:
    """Whether an engine runs and queues nothing, by its own gauges."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(sample(text, name) for name in names)


def settled_counters(engine: Engine, seconds: float = 60.0) -> Counters:
    """The engine's counters once it is idle."""
    until(lambda: engine_idle(engine), seconds, f"{engine.name} is idle")
    return engine.counters()
